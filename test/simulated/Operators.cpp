// The operators of the simulated device: those of the CPU, queued in the
// current stream.
#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
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
#include "Operators.hpp"

namespace simulated {

namespace {

bool isSim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// The same memory as a CPU tensor. Like a kernel on a GPU, it does not keep
// the memory from being freed.
at::Tensor onHost(const at::Tensor& tensor) {
  if (!isSim(tensor)) {
    return tensor;
  }
  auto host = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

at::Tensor onMeta(const at::Tensor& tensor) {
  if (!tensor.defined() || (!isSim(tensor) && tensor.dim() == 0)) {
    return tensor;  // a number among the arguments stays one
  }
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// `value` with every tensor in it, at any depth, changed by `change`.
template <class Change>
c10::IValue mapped(const c10::IValue& value, at::Device device, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) {
    return device;
  }
  return value;
}

template <class Change>
torch::jit::Stack mapped(const torch::jit::Stack& values, at::Device device, const Change& change) {
  torch::jit::Stack result;
  for (const auto& value : values) {
    result.push_back(mapped(value, device, change));
  }
  return result;
}

// The device of the first tensor that has one; else the current one.
c10::DeviceIndex deviceFor(const torch::jit::Stack& arguments) {
  c10::DeviceIndex device = -1;
  for (const auto& argument : arguments) {
    mapped(argument, at::kCPU, [&](const at::Tensor& tensor) {
      if (device < 0 && isSim(tensor)) {
        device = tensor.device().index();
      }
      return tensor;
    });
  }
  return device < 0 ? currentDevice() : device;
}

// A kernel draws from a generator of its own that was seeded at its launch, so
// that the numbers do not depend on when it runs.
void launchGenerators(
    const c10::FunctionSchema& schema, c10::DeviceIndex device, torch::jit::Stack& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() != "generator") {
      continue;
    }
    auto generator = arguments[i].isNone() ? defaultGenerator(device) : arguments[i].toGenerator();
    arguments[i] = at::detail::createCPUGenerator(drawSeed(generator));
  }
}

bool isWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard noGrad;
};

// What the operator will return, as meta tensors; nothing where only running
// it tells. Outputs among the arguments get the size that they will have.
std::optional<torch::jit::Stack> foresee(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  for (const auto& returned : op.schema().returns()) {
    const bool tensors = returned.type()->isSubtypeOf(*c10::TensorType::get()) ||
                         returned.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) {
      return std::nullopt;
    }
  }
  auto metas = mapped(arguments, at::kMeta, onMeta);
  auto stack = metas;
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;  // there is no shape function, or running it tells what is wrong
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (isWritten(op.schema().arguments()[i]) && arguments[i].isTensor()) {
      const auto& tensor = arguments[i].toTensor();
      if (isSim(tensor) && tensor.sizes() != metas[i].toTensor().sizes()) {
        tensor.resize_(metas[i].toTensor().sizes());
      }
    }
  }
  return stack;
}

at::Tensor like(const at::Tensor& tensor, c10::DeviceIndex device) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::Device(kType, device)));
}

// The argument that a return of an in-place operator is.
std::optional<size_t> argumentOf(const c10::FunctionSchema& schema, const c10::Argument& returned) {
  if (returned.alias_info() == nullptr) {
    return std::nullopt;
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() &&
        alias->beforeSets() == returned.alias_info()->beforeSets()) {
      return i;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: no kernel for the view ", schema.name());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const BelowAutograd guard;
  const auto& schema = op.schema();
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const auto device = deviceFor(arguments);
  const c10::DeviceGuard onDevice(c10::Device(kType, device));
  auto& stream = current(device);
  const auto foreseen = foresee(op, arguments);
  auto inputs = mapped(arguments, at::kCPU, onHost);
  launchGenerators(schema, device, inputs);

  if (!foreseen) {
    stream.synchronize();
    op.callBoxed(&inputs);
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      const auto argument = argumentOf(schema, schema.returns()[i]);
      torch::jit::push(
          *stack, argument ? arguments[*argument] : mapped(inputs[i], at::kCPU, [&](auto& tensor) {
            return tensor.defined() ? tensor.to(at::Device(kType, device)) : tensor;
          }));
    }
    return;
  }
  // Where each result goes: to new memory, or it is there already.
  torch::jit::Stack places;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto argument = argumentOf(schema, schema.returns()[i]);
    auto result = argument ? arguments[*argument]
                           : mapped((*foreseen)[i], at::kMeta, [&](const at::Tensor& tensor) {
                               return tensor.defined() ? like(tensor, device) : tensor;
                             });
    places.push_back(argument ? c10::IValue() : mapped(result, at::kCPU, onHost));
    torch::jit::push(*stack, std::move(result));
  }
  stream.enqueue([op, inputs = std::move(inputs), places = std::move(places)]() mutable {
    const BelowAutograd below;
    op.callBoxed(&inputs);
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i].isTensor() && places[i].toTensor().defined()) {
        places[i].toTensor().copy_(inputs[i].toTensor());
      } else if (places[i].isTensorList()) {
        const auto to = places[i].toTensorVector();
        const auto from = inputs[i].toTensorVector();
        for (size_t j = 0; j < to.size(); ++j) {
          to[j].copy_(from[j]);
        }
      }
    }
  });
}

// ---------------------------------------------------------------- memory

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> /*pinned*/,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor emptyStrided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> /*pinned*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
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
    at::Tensor& self,
    at::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
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
  // Of pageable memory the copy takes what is in it now.
  const bool staged = !isSim(self) && !isPinned(self.data_ptr());
  auto from = isSim(self) ? onHost(self) : staged ? self.clone() : self;
  stream.enqueue([from = std::move(from), place = onHost(to)] {
    const BelowAutograd below;
    place.copy_(from);
  });
  // Into pageable memory a copy is never asynchronous.
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
