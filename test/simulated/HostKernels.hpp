// Runs the CPU's kernels for a device whose memory is the host's: an operator is queued in the
// current stream, and runs on the same memory.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <optional>

namespace simulated {

class HostKernels {
 public:
  explicit HostKernels(c10::DeviceType type) : type_(type) {}
  virtual ~HostKernels() = default;

  // Runs an operator; the boxed fallback of a device's key.
  void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) const;

  bool isOurs(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.device().type() == type_;
  }

  // Returns the same memory as a CPU tensor. Like a kernel on a GPU, it does not keep the memory
  // from being freed.
  at::Tensor onHost(const at::Tensor& tensor) const;

  // Runs the kernel in the device's current stream. It may run again, with each replay of a graph,
  // and raises what is wrong.
  virtual void enqueue(c10::DeviceIndex device, std::function<void()> kernel) const = 0;

 protected:
  virtual c10::DeviceIndex currentDevice() const = 0;
  // Waits for the current stream.
  virtual void synchronize(c10::DeviceIndex device) const = 0;
  // Returns the function that gives the seed of the kernel's own generator when it runs, drawn now
  // from the operator's generator, or the device's if it was given none.
  virtual std::function<uint64_t()> drawSeed(
      c10::DeviceIndex device, const c10::IValue& generator) const = 0;

 private:
  template <class Change>
  c10::IValue mapped(const c10::IValue& value, at::Device device, const Change& change) const;
  template <class Change>
  torch::jit::Stack mapped(
      const torch::jit::Stack& values, at::Device device, const Change& change) const;
  at::Tensor onMeta(const at::Tensor& tensor) const;
  c10::DeviceIndex deviceFor(const torch::jit::Stack& arguments) const;
  std::optional<torch::jit::Stack> foresee(
      const c10::OperatorHandle& op, const torch::jit::Stack& arguments) const;

  const c10::DeviceType type_;
};

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode noGrad{false};
};

}  // namespace simulated
