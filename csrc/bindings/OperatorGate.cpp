// Shows Python those operators of torch alone that an asynchronous operation may be concerned by.
//
// A TorchDispatchMode costs each operator two passages through Python, four to twelve times the
// time of a tiny one. The gate is a kernel in C++ that each operator passes instead. It compares
// addresses. While an operator runs that touches guarded memory, or that c10d has registered, the
// gate keeps the mode on torch's stack.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/Bindings.hpp"

namespace torchcomms_pg {

namespace {

// The key of a mode above autograd. torch keeps it for tests, and has no kernel for it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKeySet kOfPython{
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot};

using Mode = std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>;

// Addresses of the first byte, and behind the last one.
using Bytes = std::pair<uint64_t, uint64_t>;

// What operators are compared with. Operators run without the GIL.
struct Guarded {
  std::shared_mutex mutex;
  Mode mode;
  std::vector<std::pair<uint64_t, Bytes>> memory;  // with the key that it was given with
  std::atomic<bool> any{false};                    // whether there is memory
};

// Never freed: threads may run operators at the process's end.
std::atomic<Guarded*> guarded{new Guarded};

bool inGuarded(const Guarded& all, const at::Tensor& tensor) {
  // A subclass of Tensor shows its plain tensors to its own operators.
  if (!tensor.defined() || tensor.key_set().has_any(kOfPython) || !tensor.has_storage() ||
      !tensor.device().is_cpu() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
      tensor.numel() == 0) {
    return false;
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto width = static_cast<int64_t>(tensor.element_size());
  const auto begin = reinterpret_cast<uint64_t>(storage->_mutable_data_ptr_no_checks().get()) +
                     static_cast<uint64_t>(tensor.storage_offset() * width);
  int64_t last = 0;  // element with the highest address
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const uint64_t end = begin + static_cast<uint64_t>((last + 1) * width);
  return std::any_of(all.memory.begin(), all.memory.end(), [&](const auto& each) {
    return begin < each.second.second && each.second.first < end;
  });
}

bool inGuarded(const Guarded& all, const c10::IValue& value) {
  if (value.isTensor()) {
    return inGuarded(all, value.toTensor());
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) {
    return false;
  }
  const auto list = value.toListRef();
  return std::any_of(
      list.begin(), list.end(), [&](const auto& each) { return inGuarded(all, each); });
}

// Returns the mode that has to see a call of an operator; null if no mode has.
Mode modeFor(
    const c10::OperatorHandle& operation,
    c10::DispatchKeySet keys,
    const torch::jit::Stack& stack) {
  Guarded& all = *guarded.load(std::memory_order_acquire);
  const std::string_view name = operation.operator_name().name;
  // Subclasses of Tensor and other modes call operators that do not pass this key.
  const bool always = keys.has(c10::DispatchKey::Python) || name.starts_with("c10d::") ||
                      name.starts_with("_c10d_functional::");
  if (!always && !all.any.load(std::memory_order_acquire)) {
    return nullptr;
  }
  const std::shared_lock lock(all.mutex);
  const auto arguments = torch::jit::last(stack, operation.schema().arguments().size());
  const bool concerned =
      always || std::any_of(arguments.begin(), arguments.end(), [&](const auto& each) {
        return inGuarded(all, each);
      });
  return concerned ? all.mode : nullptr;
}

using Modes = c10::impl::TorchDispatchModeTLS;

// Pops the modes that a program has begun in this thread; the last one is the first.
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

// Makes the mode see operators below the program's modes, so what they pass on.
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
  Mode mode = excluded.has(c10::DispatchKey::Python) ? nullptr : modeFor(operation, keys, *stack);
  if (mode == nullptr) {
    operation.redispatchBoxed(keys, stack);
    return;
  }
  const Shown shown(std::move(mode));
  operation.redispatchBoxed(keys | (kOfPython - excluded), stack);
}

void showOperators(const py::object& mode) {
  // torch changes its table of each operator for the kernel, so only for who asks for it.
  static auto* const library = [] {
    auto* made =
        new torch::Library(torch::Library::IMPL, "_", std::make_optional(kKey), __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&pass>());
    return made;
  }();
  (void)library;
  Mode next = mode.is_none() ? nullptr
                             : std::make_shared<c10::impl::PyObject_TorchDispatchMode>(
                                   mode.inc_ref().ptr(), getPyInterpreter());
  Guarded& all = *guarded.load(std::memory_order_acquire);
  const std::unique_lock lock(all.mutex);
  all.mode.swap(next);
}

bool showThread(bool shown) {
  const bool was = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, shown);
  return was;
}

void guardMemory(uint64_t key, const std::vector<Bytes>& memory) {
  Guarded& all = *guarded.load(std::memory_order_acquire);
  const std::unique_lock lock(all.mutex);
  std::erase_if(all.memory, [&](const auto& each) { return each.first == key; });
  for (const Bytes& each : memory) {
    all.memory.emplace_back(key, each);
  }
  all.any.store(!all.memory.empty(), std::memory_order_release);
}

void guardNothing() {
  Guarded& all = *guarded.load(std::memory_order_acquire);
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  if (lock.owns_lock()) {
    all.memory.clear();
    all.any.store(false, std::memory_order_release);
    return;
  }
  // A thread that a forked child lacks may hold the mutex for ever.
  auto* next = new Guarded;
  next->mode = all.mode;
  guarded.store(next, std::memory_order_release);
}

}  // namespace

void bindOperatorGate(py::module_& module) {
  module.def("show_operators", &showOperators, py::arg("mode"));
  module.def("show_thread", &showThread, py::arg("shown"));
  module.def("guard_memory", &guardMemory, py::arg("key"), py::arg("memory"));
  module.def("guard_nothing", &guardNothing);
}

}  // namespace torchcomms_pg
