// torch's operators on the emulated GPUs: each that has a kernel for CUDA runs
// the CPU's on the same memory, queued in the current stream.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "libcudart/Emulated.hpp"
#include "simulated/HostKernels.hpp"

namespace emulated {

namespace {

using simulated::BelowAutograd;

class Kernels final : public simulated::HostKernels {
 public:
  Kernels() : HostKernels(c10::DeviceType::CUDA) {}

  void enqueue(c10::DeviceIndex device, std::function<void()> kernel) const override {
    const c10::DeviceGuard onDevice(c10::Device(c10::kCUDA, device));
    const auto stream = c10::cuda::getCurrentCUDAStream(device);
    C10_CUDA_CHECK(queueKernel(stream.stream(), std::move(kernel)));
  }

 private:
  c10::DeviceIndex currentDevice() const override { return c10::cuda::current_device(); }

  void synchronize(c10::DeviceIndex device) const override {
    c10::cuda::getCurrentCUDAStream(device).synchronize();
  }

  // Draws anew with each replay of a graph: then the generator's state is in memory that torch
  // writes before the replay.
  std::function<uint64_t()> drawSeed(
      c10::DeviceIndex device, const c10::IValue& given) const override {
    constexpr uint64_t kNumbers = 4;  // of a thread of a real kernel
    constexpr uint64_t kMix = 0x9e3779b97f4a7c15;
    const auto generator =
        given.isNone() ? at::cuda::detail::getDefaultCUDAGenerator(device) : given.toGenerator();
    auto* const own = at::check_generator<at::CUDAGeneratorImpl>(generator);
    at::PhiloxCudaState state;
    {
      const std::lock_guard lock(own->mutex_);
      state = own->philox_cuda_state(kNumbers);
    }
    return [state] {
      if (!state.captured_) return state.seed_.val + kMix * state.offset_.val;
      return static_cast<uint64_t>(*state.seed_.ptr) +
             kMix * (static_cast<uint64_t>(*state.offset_.ptr) + state.offset_intragraph_);
    };
  }
};

const Kernels kernels;

void runOnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  kernels.run(op, stack);
}

// ---------------------------------------------------------------- copies

void copyInStream(const at::Tensor& to, const at::Tensor& from) {
  kernels.enqueue(to.device().index(), [to = kernels.onHost(to), from = kernels.onHost(from)] {
    const BelowAutograd below;
    to.copy_(from);
  });
}

// Returns whether a copy is one of bytes, which torch leaves to cudaMemcpyAsync.
bool isPlain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
         to.is_contiguous() && from.is_contiguous() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg();
}

// torch's own, except for what takes a kernel there: a cast or other strides.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool nonBlocking) {
  const BelowAutograd below;
  if (to.numel() == 0 || isPlain(to, from)) {
    return at::native::copy_(to, from, nonBlocking);
  }
  const bool toGpu = kernels.isOurs(to);
  const bool fromGpu = kernels.isOurs(from);
  if (toGpu && fromGpu && to.device() == from.device()) {
    copyInStream(to, from);
  } else if (toGpu) {
    // The bytes first, to the device, and there the rest.
    auto source = from.expand(to.sizes()).contiguous().resolve_conj().resolve_neg();
    auto staged = at::empty(source.sizes(), source.options().device(to.device()));
    copy(staged, source, nonBlocking);
    const c10::DeviceGuard onDevice(to.device());
    copyInStream(to, staged);
  } else {
    auto source = from.contiguous().resolve_conj().resolve_neg();
    auto staged = at::empty(source.sizes(), source.options().device(at::kCPU).pinned_memory(false));
    copy(staged, source, false);
    to.copy_(staged);
  }
  return to;
}

// ---------------------------------------------------------------- registration

// They launch no kernel: torch's own do with the runtime alone.
const std::set<std::string> kTorchsOwn{
    "aten::_copy_from",
    "aten::_efficientzerotensor",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::_unsafe_view",
    "aten::as_strided",
    "aten::copy_",
    "aten::empty",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::unfold",
    "aten::view",
    "aten::view_as_complex",
    "aten::view_as_real",
};

bool returnsView(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) return true;
  }
  return false;
}

// torch warns once when a kernel takes another's place, which is what is wanted here.
class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void install() {
  NoWarnings quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  constexpr auto kKey = c10::DispatchKey::CUDA;
  // Never destroyed: torch runs operators until the process is gone.
  auto& registered = *new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto add = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
    registered.push_back(
        dispatcher.registerImpl(name, kKey, std::move(kernel), std::nullopt, nullptr, "emulated"));
  };
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::") || kTorchsOwn.contains(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(kKey) || returnsView(op->schema())) continue;
    add(name, c10::KernelFunction::makeFromBoxedFunction<&runOnHost>());
  }
  add({"aten::copy_", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy));
}

[[maybe_unused]] const bool installed = (install(), true);

}  // namespace

}  // namespace emulated
