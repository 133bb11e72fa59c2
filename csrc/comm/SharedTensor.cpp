#include "comm/SharedTensor.hpp"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <memory>

namespace torchcomms_pg {

namespace {

// What the storage of a shared tensor owns.
struct Block {
  const NcclApi& api;
  void* memory;
  at::DataPtr before;  // what the storage had until it was moved

  Block(const NcclApi& api, void* memory) : api(api), memory(memory) {}
  ~Block() { api.memFree(memory); }
};

void freeBlock(void* block) {
  delete static_cast<Block*>(block);
}

at::DataPtr allocate(const char* what, const NcclApi& api, size_t bytes) {
  void* memory = nullptr;
  const auto result = api.memAlloc(&memory, bytes);
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      result == ncclSuccess,
      what,
      ": no shared memory for ",
      bytes,
      " bytes: ",
      api.getLastError(nullptr));
  return {memory, new Block(api, memory), &freeBlock, at::kCPU};
}

}  // namespace

at::Tensor makeSharedTensor(
    const char* what, const NcclApi& api, int64_t numel, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(numel >= 0, what, ": size is ", numel, ", wanted 0 or more");
  const size_t bytes = numel * c10::elementSize(dtype);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      bytes,
      allocate(what, api, bytes),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  auto tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(at::kCPU));
  tensor.set_(at::Storage(std::move(storage)), 0, {numel}, {1});
  return tensor;
}

void moveToShared(const char* what, const NcclApi& api, const at::Tensor& tensor) {
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == 0 || storage->data_ptr().get_deleter() == &freeBlock) {
    return;
  }
  auto* const content = storage->mutable_data();  // of a lazy clone: makes its own memory
  // torch.multiprocessing's storages call themselves resizable too.
  TORCH_CHECK_VALUE(
      storage->resizable() &&
          storage->data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter(),
      what,
      ": the memory of the tensor belongs to something else, such as a NumPy array, a file or "
      "torch.multiprocessing, and cannot become memory that peers map; pass tensor.clone() or a "
      "tensor of allocate_tensor()");
  auto shared = allocate(what, api, storage->nbytes());
  std::memcpy(shared.get(), content, storage->nbytes());
  auto* const block = static_cast<Block*>(shared.get_context());
  block->before = storage->set_data_ptr(std::move(shared));
  storage->set_resizable(false);
}

}  // namespace torchcomms_pg
