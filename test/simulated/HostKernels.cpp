#include "HostKernels.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>

#include <utility>

namespace simulated {

namespace {

bool isWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Returns the index of the argument that a return of an in-place operator is.
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
  TORCH_CHECK_NOT_IMPLEMENTED(false, "there is no kernel for the view ", schema.name());
}

// A kernel draws from a generator of its own, so that the numbers do not depend on when it runs.
struct Seed {
  size_t argument;
  std::function<uint64_t()> draw;
};

void setGenerators(torch::jit::Stack& arguments, const std::vector<Seed>& seeds) {
  for (const auto& [argument, draw] : seeds) {
    arguments[argument] = at::detail::createCPUGenerator(draw());
  }
}

}  // namespace

at::Tensor HostKernels::onHost(const at::Tensor& tensor) const {
  if (!isOurs(tensor)) {
    return tensor;
  }
  auto host = at::from_blob(
      tensor.numel() == 0 ? nullptr : tensor.data_ptr(), tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kCPU));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

at::Tensor HostKernels::onMeta(const at::Tensor& tensor) const {
  if (!tensor.defined() || (!isOurs(tensor) && tensor.dim() == 0)) {
    return tensor;  // a number among the arguments stays one
  }
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// Returns `value` with every tensor in it, at any depth, changed by `change`.
template <class Change>
c10::IValue HostKernels::mapped(
    const c10::IValue& value, at::Device device, const Change& change) const {
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
  if (value.isDevice() && value.toDevice().type() == type_) {
    return device;
  }
  return value;
}

template <class Change>
torch::jit::Stack HostKernels::mapped(
    const torch::jit::Stack& values, at::Device device, const Change& change) const {
  torch::jit::Stack result;
  for (const auto& value : values) {
    result.push_back(mapped(value, device, change));
  }
  return result;
}

// Returns the device of the first tensor that has one; else the current one.
c10::DeviceIndex HostKernels::deviceFor(const torch::jit::Stack& arguments) const {
  c10::DeviceIndex device = -1;
  for (const auto& argument : arguments) {
    mapped(argument, at::kCPU, [&](const at::Tensor& tensor) {
      if (device < 0 && isOurs(tensor)) {
        device = tensor.device().index();
      }
      return tensor;
    });
  }
  return device < 0 ? currentDevice() : device;
}

// Returns the operator's results as meta tensors; nothing if only running it tells. Outputs among
// the arguments get the size that they will have.
std::optional<torch::jit::Stack> HostKernels::foresee(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments) const {
  for (const auto& returned : op.schema().returns()) {
    const bool tensors = returned.type()->isSubtypeOf(*c10::TensorType::get()) ||
                         returned.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) {
      return std::nullopt;
    }
  }
  const auto change = [this](const at::Tensor& tensor) { return onMeta(tensor); };
  const auto metas = mapped(arguments, at::kMeta, change);
  auto stack = metas;
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;  // there is no shape function, or running it tells what is wrong
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (isWritten(op.schema().arguments()[i]) && arguments[i].isTensor()) {
      const auto& tensor = arguments[i].toTensor();
      if (isOurs(tensor) && tensor.sizes() != metas[i].toTensor().sizes()) {
        tensor.resize_(metas[i].toTensor().sizes());
      }
    }
  }
  return stack;
}

void HostKernels::run(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
  const BelowAutograd guard;
  const auto& schema = op.schema();
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const auto index = deviceFor(arguments);
  const at::Device device(type_, index);
  const c10::DeviceGuard onDevice(device);
  const auto foreseen = foresee(op, arguments);
  // Takes the CPU's own tensors without their Python objects: a kernel may hold them when the
  // interpreter ends.
  const auto toHost = [this](const at::Tensor& tensor) {
    return isOurs(tensor) || !tensor.defined() ? onHost(tensor) : tensor.variable_data();
  };
  auto inputs = mapped(arguments, at::kCPU, toHost);
  std::vector<Seed> seeds;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() == "generator") {
      seeds.push_back({i, drawSeed(index, arguments[i])});
    }
  }

  if (!foreseen) {
    synchronize(index);
    setGenerators(inputs, seeds);
    op.callBoxed(&inputs);
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      const auto argument = argumentOf(schema, schema.returns()[i]);
      torch::jit::push(
          *stack, argument ? arguments[*argument] : mapped(inputs[i], at::kCPU, [&](auto& tensor) {
            return tensor.defined() ? tensor.to(device) : tensor;
          }));
    }
    return;
  }
  // Places of the results: new memory, or memory that is there already.
  torch::jit::Stack places;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto argument = argumentOf(schema, schema.returns()[i]);
    auto result = argument ? arguments[*argument]
                           : mapped((*foreseen)[i], at::kMeta, [&](const at::Tensor& tensor) {
                               return tensor.defined() ? at::empty_strided(
                                                             tensor.sizes(), tensor.strides(),
                                                             tensor.options().device(device))
                                                       : tensor;
                             });
    places.push_back(argument ? c10::IValue() : mapped(result, at::kCPU, toHost));
    torch::jit::push(*stack, std::move(result));
  }
  enqueue(
      index,
      [op, inputs = std::move(inputs), places = std::move(places), seeds = std::move(seeds)] {
        const BelowAutograd below;
        auto stack = inputs;
        setGenerators(stack, seeds);
        op.callBoxed(&stack);
        for (size_t i = 0; i < places.size(); ++i) {
          if (places[i].isTensor() && places[i].toTensor().defined()) {
            places[i].toTensor().copy_(stack[i].toTensor());
          } else if (places[i].isTensorList()) {
            const auto to = places[i].toTensorVector();
            const auto from = stack[i].toTensorVector();
            for (size_t j = 0; j < to.size(); ++j) {
              to[j].copy_(from[j]);
            }
          }
        }
      });
}

}  // namespace simulated
