// Shows Python only those operators of torch that may concern an asynchronous operation.
//
// A TorchDispatchMode costs each operator two passages through Python, four to twelve times the
// time of a tiny one. The gate is a kernel in C++ that each operator passes instead. It compares
// addresses. While an operator runs that touches memory of a flight, or a functional collective,
// the gate keeps the mode on torch's stack. It issues the asynchronous operations of c10d on
// copies.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/AtomicShared.hpp"
#include "base/NeverDestroyed.hpp"
#include "bindings/Bindings.hpp"
#include "bindings/LateWork.hpp"

namespace torchcomms_pg {

namespace {

// The key of a mode above autograd. torch keeps it for tests, and has no kernel for it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKeySet kOfPython{
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot};

constexpr std::string_view kC10d = "c10d::";

// Keys of what sees or changes the arguments of an operator of c10d before this file does: the
// program's modes, subclasses of Tensor, and torch's views of complex numbers. The operator is
// called again below them, and the mode passes it on (show_again).
constexpr c10::DispatchKeySet kShownFirst{
    c10::DispatchKey::Python, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
    c10::DispatchKey::ZeroTensor};

using Mode = std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>;

// Which arguments of an operator of c10d an operation writes, and which it only reads.
struct Roles {
  std::string name;  // in reports
  std::vector<size_t> writes, reads;
  size_t group;
  std::optional<size_t> async;  // messages have no such argument
  std::optional<size_t> root;
  bool rootReads;  // whether the root only reads `writes`; otherwise the other ranks do
};

// What sees operators: a mode of Python, and a callable that makes the object of Python for each
// operation of c10d that is issued asynchronously.
struct Audience {
  Mode mode;
  c10::SafePyObject issued;
  std::map<std::string, Roles, std::less<>> roles;  // by the operator's name
};

// Operators run without the GIL. Never freed: threads may run operators at the process's end.
auto& currentAudience = neverDestroyed<AtomicShared<const Audience>>();

bool concernsFlight(const c10::IValue& value) {
  if (value.isTensor()) {
    return flights::concern(value.toTensor());
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) {
    return false;
  }
  return std::ranges::any_of(value.toListRef(), concernsFlight);
}

// Returns the mode that has to see a call of an operator; null if no mode has.
Mode modeFor(
    const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
    const torch::jit::Stack& stack) {
  const std::string_view name = operation.operator_name().name;
  // Subclasses of Tensor and other modes call operators that do not pass this key.
  bool shown = keys.has(c10::DispatchKey::Python) || name.starts_with("_c10d_functional::") ||
               (name.starts_with(kC10d) && keys.has_any(kShownFirst));
  if (!shown && flights::any()) {
    const auto arguments = torch::jit::last(stack, operation.schema().arguments().size());
    shown = std::ranges::any_of(arguments, concernsFlight);
  }
  const auto audience = shown ? currentAudience.load() : nullptr;
  return audience == nullptr ? nullptr : audience->mode;
}

void appendTensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) {
      appendTensors(each, tensors);
    }
  }
}

// Returns the value with the next tensors in place of its tensors.
c10::IValue replaced(const c10::IValue& value, std::vector<at::Tensor>::const_iterator& next) {
  if (value.isTensor()) {
    return *next++;
  }
  if (!value.isList()) {
    return value;
  }
  c10::impl::GenericList list(value.toList().elementType());
  for (const c10::IValue& each : value.toListRef()) {
    list.push_back(replaced(each, next));
  }
  return list;
}

// Calls an operator of c10d; if it is asynchronous, on copies.
void issueC10d(
    const Audience& audience, const Roles& known, const c10::OperatorHandle& operation,
    c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = operation.schema().arguments().size();
  const auto argument = [&](size_t position) -> c10::IValue& {
    return (*stack)[stack->size() - count + position];
  };
  const auto group = argument(known.group).toCustomClass<c10d::ProcessGroup>();
  std::vector<size_t> writes = known.writes;
  std::vector<size_t> reads = known.reads;
  // The root of a broadcast only reads; in a reduce every other rank only reads.
  if (known.root && (argument(*known.root).toInt() == group->getRank()) == known.rootReads) {
    reads = std::exchange(writes, {});
  }
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (const size_t each : writes) {
    appendTensors(argument(each), outputs);
  }
  for (const size_t each : reads) {
    appendTensors(argument(each), inputs);
  }
  const bool async = !known.async || argument(*known.async).toBool();
  auto issue = showCall(
      audience.issued,
      {known.name, group->getGroupName(), group->getGroupDesc(), outputs, inputs, async});
  if (!issue) {
    operation.redispatchBoxed(keys, stack);
    return;
  }
  std::optional<c10::IValue> returned;
  if (operation.schema().returns().size() > 1) {
    returned = argument((writes.empty() ? reads : writes).front());
  }
  const auto call = [&](const auto& written, const auto& read) {
    auto next = written.begin();
    for (const size_t each : writes) {
      argument(each) = replaced(argument(each), next);
    }
    next = read.begin();
    for (const size_t each : reads) {
      argument(each) = replaced(argument(each), next);
    }
    const c10::impl::ExcludeDispatchKeyGuard unseen(kKey);
    operation.redispatchBoxed(keys, stack);
    return stack->back().toCustomClass<c10d::Work>();
  };
  auto work = issueLate(std::move(*issue), outputs, inputs, call, group.get());
  if (returned) {
    (*stack)[stack->size() - 2] = std::move(*returned);
  }
  stack->back() = std::move(work);
}

using Modes = c10::impl::TorchDispatchModeTLS;

// Pops the modes that a program has begun in this thread, from the last to the first.
std::vector<Mode> takeModes() {
  std::vector<Mode> taken;
  while (Modes::any_modes_set(/*skip_infra_modes=*/true)) {
    taken.push_back(Modes::pop_stack());
  }
  return taken;
}

void putBack(std::vector<Mode> modes) {
  for (; !modes.empty(); modes.pop_back()) {
    Modes::push_non_infra_mode_onto_stack(std::move(modes.back()));
  }
}

// Makes the mode see operators below the program's modes, and so the operators that those pass on.
class Shown {
 public:
  explicit Shown(Mode mode) : unseen_(kKey) {
    auto modes = takeModes();
    modes.push_back(std::move(mode));
    putBack(std::move(modes));
  }
  ~Shown() {
    auto modes = takeModes();
    modes.pop_back();
    putBack(std::move(modes));
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard unseen_;  // the mode sees what the operator calls
};

void pass(
    const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  if (excluded.has(c10::DispatchKey::Python)) {
    operation.redispatchBoxed(keys, stack);
    return;
  }
  const std::string_view name = operation.operator_name().name;
  if (name.starts_with(kC10d) && !keys.has_any(kShownFirst)) {
    if (const auto audience = currentAudience.load()) {
      const auto roles = audience->roles.find(name.substr(kC10d.size()));
      if (roles != audience->roles.end()) {
        issueC10d(*audience, roles->second, operation, keys, stack);
        return;
      }
    }
  }
  Mode mode = modeFor(operation, keys, *stack);
  if (mode == nullptr) {
    operation.redispatchBoxed(keys, stack);
    return;
  }
  const Shown shown(std::move(mode));
  operation.redispatchBoxed(keys | (kOfPython - excluded), stack);
}

Roles rolesOf(const py::dict& values) {
  return {
      values["name"].cast<std::string>(),
      values["writes"].cast<std::vector<size_t>>(),
      values["reads"].cast<std::vector<size_t>>(),
      values["group"].cast<size_t>(),
      values["async_op"].cast<std::optional<size_t>>(),
      values["root"].cast<std::optional<size_t>>(),
      values["root_reads"].cast<bool>()};
}

void showOperators(
    py::object mode, py::object issued, const std::map<std::string, py::dict>& roles) {
  // Only on request, since torch changes its table of each operator for the kernel.
  static auto* const library = [] {
    auto* made =
        new torch::Library(torch::Library::IMPL, "_", std::make_optional(kKey), __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&pass>());
    return made;
  }();
  (void)library;
  auto made = std::make_shared<Audience>(Audience{
      std::make_shared<c10::impl::PyObject_TorchDispatchMode>(
          mode.release().ptr(), getPyInterpreter()),
      c10::SafePyObject(issued.release().ptr(), getPyInterpreter()),
      {}});
  for (const auto& [name, values] : roles) {
    made->roles.emplace(name, rolesOf(values));
  }
  currentAudience.store(std::move(made));
}

bool showThread(bool shown) {
  const bool was = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, shown);
  return was;
}

// Shows the mode an operator once more, without the program's modes.
class ShownAgain {
 public:
  ShownAgain() : excluded_(c10::impl::tls_is_dispatch_key_excluded(kKey)) {
    c10::impl::tls_set_dispatch_key_excluded(kKey, false);
  }
  ~ShownAgain() { c10::impl::tls_set_dispatch_key_excluded(kKey, excluded_); }
  ShownAgain(const ShownAgain&) = delete;
  ShownAgain& operator=(const ShownAgain&) = delete;

 private:
  const bool excluded_;
};

}  // namespace

void bindOperatorGate(py::module_& module) {
  module.def(
      "show_operators", &showOperators, py::arg("mode"), py::arg("issued"), py::arg("roles"));
  module.def("show_no_operators", [] { currentAudience.store(nullptr); });
  module.def("show_thread", &showThread, py::arg("shown"));
  module.def(
      "show_again",
      [](const py::function& operation, const py::args& args, const py::kwargs& kwargs) {
        const ShownAgain shown;
        return operation(*args, **kwargs);
      },
      py::arg("operation"));
}

}  // namespace torchcomms_pg
