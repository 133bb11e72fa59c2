#include "window/SharedTensor.hpp"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace torchcomms_pg {

namespace {

void synchronize(at::Device device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

// Context of a shared tensor's storage. Its destructor frees the memory.
struct Block {
  const Library& api;
  void* memory;
  at::Device device;
  at::DataPtr before = {};  // the storage's memory before moveToShared()

  ~Block() {
    try {
      // Waits for the device: torch reuses its own memory in stream order, but memFree frees at
      // once.
      const c10::DeviceGuard onDevice(device);
      synchronize(device);
      api.memFree(memory);
    } catch (const std::exception&) {
      // The device has failed or the process is exiting. Either frees the memory.
    }
  }
};

void freeBlock(void* block) {
  delete static_cast<Block*>(block);
}

at::DataPtr allocate(const char* what, const Library& api, size_t bytes, at::Device device) {
  void* memory = nullptr;
  const c10::DeviceGuard onDevice(device);
  const auto result = api.memAlloc(&memory, bytes);
  TORCH_CHECK_WITH(
      OutOfMemoryError, result == ncclSuccess, what, ": no shared memory for ", bytes, " bytes on ",
      device, ": ", api.getLastError(nullptr));
  return {memory, new Block{api, memory, device}, &freeBlock, device};
}

at::Tensor bytesOf(void* memory, size_t bytes, at::Device device) {
  return at::for_blob(memory, {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

at::Tensor makeSharedTensor(
    const char* what, const Library& api, int64_t numel, c10::ScalarType dtype, at::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      api.has(Feature::allocator), what, ": the loaded library has no memory that peers map (",
      introduced(Feature::allocator).functions, " came with NCCL ",
      introduced(Feature::allocator).version, ")");
  TORCH_CHECK_VALUE(numel >= 0, what, ": size is ", numel, ", wanted 0 or more");
  const size_t bytes = numel * c10::elementSize(dtype);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, allocate(what, api, bytes, device),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  auto tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  tensor.set_(at::Storage(std::move(storage)), 0, {numel}, {1});
  return tensor;
}

void moveToShared(const char* what, const Library& api, const at::Tensor& tensor) {
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == 0 || storage->data_ptr().get_deleter() == &freeBlock) {
    return;
  }
  const auto device = tensor.device();
  auto* const content = storage->mutable_data();  // makes a lazy clone own its memory
  // On the CPU, storages of torch.multiprocessing also report that they are resizable.
  TORCH_CHECK_VALUE(
      storage->resizable() && (!device.is_cpu() || storage->data_ptr().get_deleter() ==
                                                       c10::GetCPUAllocator()->raw_deleter()),
      what,
      ": the memory of the tensor belongs to something else, such as a NumPy array, a file or "
      "torch.multiprocessing, and cannot become memory that peers map; pass tensor.clone() or a "
      "tensor of allocate_tensor()");
  auto shared = allocate(what, api, storage->nbytes(), device);
  bytesOf(shared.get(), storage->nbytes(), device)
      .copy_(bytesOf(content, storage->nbytes(), device));
  synchronize(device);
  auto* const block = static_cast<Block*>(shared.get_context());
  block->before = storage->set_data_ptr(std::move(shared));
  storage->set_resizable(false);
}

}  // namespace torchcomms_pg
