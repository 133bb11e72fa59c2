// The operators of the simulated device: those of the CPU, queued in the
// current stream.
#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <utility>

#include "Device.hpp"
#include "HostKernels.hpp"
#include "Operators.hpp"

namespace simulated {

namespace {

class Kernels final : public HostKernels {
 public:
  Kernels() : HostKernels(kType) {}

  void enqueue(c10::DeviceIndex device, std::function<void()> kernel) const override {
    current(device).enqueue(std::move(kernel));
  }

 private:
  c10::DeviceIndex currentDevice() const override { return simulated::currentDevice(); }
  void synchronize(c10::DeviceIndex device) const override { current(device).synchronize(); }
  std::function<uint64_t()> drawSeed(
      c10::DeviceIndex device, const c10::IValue& given) const override {
    auto generator = given.isNone() ? defaultGenerator(device) : given.toGenerator();
    return [seed = simulated::drawSeed(generator)] { return seed; };
  }
};

const Kernels kernels;

bool isSim(const at::Tensor& tensor) {
  return kernels.isOurs(tensor);
}

at::Tensor onHost(const at::Tensor& tensor) {
  return kernels.onHost(tensor);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  kernels.run(op, stack);
}

// ---------------------------------------------------------------- memory

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
    std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor emptyStrided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
    std::optional<bool> /*pinned*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Gives the storage new memory of that size, with its old content.
void resizeStorage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto memory = allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    current(currentDevice()).enqueue([to = memory.get(), from = storage.data(), kept] {
      std::memcpy(to, from, kept);
    });
  }
  auto* const impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> /*format*/) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (static_cast<size_t>(needed) > self.storage().nbytes()) {
    resizeStorage(self.storage(), needed);
  }
  return self;
}

at::Tensor& setStorage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.expect_int());
  return self;
}

at::Tensor& setWholeStorage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return setStorage(self, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

at::Tensor& setTensor(at::Tensor& self, const at::Tensor& source) {
  return setStorage(
      self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor copyFrom(const at::Tensor& self, const at::Tensor& to, bool nonBlocking) {
  const BelowAutograd guard;
  if (self.numel() == 0) {
    return to;
  }
  if (isSim(self) && isSim(to) && self.device() != to.device()) {
    // Both devices take part, as on GPUs.
    current(self.device().index()).synchronize();
    current(to.device().index()).synchronize();
  }
  const c10::DeviceGuard onDevice(isSim(to) ? to.device() : self.device());
  auto& stream = current(currentDevice());
  // A copy from pageable memory takes what is in it now.
  const bool staged = !isSim(self) && !isPinned(self.data_ptr());
  auto from = isSim(self) ? onHost(self) : staged ? self.clone() : self;
  stream.enqueue([from = std::move(from), place = onHost(to)] {
    const BelowAutograd below;
    place.copy_(from);
  });
  // A copy into pageable memory is never asynchronous.
  const bool into = !isSim(to) && !(nonBlocking && isPinned(to.data_ptr()));
  if (into || (!isSim(self) && !nonBlocking && !staged)) {
    stream.synchronize();
  }
  return to;
}

at::Tensor copyFromAndResize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) {
    to.resize_(self.sizes());
  }
  return copyFrom(self, to, /*nonBlocking=*/false);
}

at::Scalar item(const at::Tensor& self) {
  current(self.device().index()).synchronize();
  return onHost(self).item();
}

void recordTensor(at::Tensor& self, c10::Stream stream) {
  recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", emptyStrided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", setStorage);
  library.impl("set_.source_Storage", setWholeStorage);
  library.impl("set_.source_Tensor", setTensor);
  library.impl("_copy_from", copyFrom);
  library.impl("_copy_from_and_resize", copyFromAndResize);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", recordTensor);
}

}  // namespace simulated
