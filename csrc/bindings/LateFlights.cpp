#include "bindings/LateFlights.hpp"

#include <ATen/Functions.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <shared_mutex>
#include <utility>

#include "bindings/Bindings.hpp"

namespace torchcomms_pg {

namespace {

// What operators are compared with. Operators run without the GIL.
struct Registry {
  std::shared_mutex mutex;
  std::vector<std::shared_ptr<LateFlight>> flights;
  uint64_t added = 0;
  std::atomic<bool> any{false};
};

// Never freed: threads may run operators at the process's end.
std::atomic<Registry*> registry{new Registry};

constexpr uint64_t kSweep = 64;

using Element = std::array<char, 16>;

template <class T>
Element elementOf(T value) {
  Element element{};
  std::memcpy(element.data(), &value, sizeof value);
  return element;
}

// Returns an element of poison, of as many bytes as a value of the type has.
Element poisonOf(at::ScalarType dtype) {
  constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr auto kNanf = std::numeric_limits<float>::quiet_NaN();
  switch (dtype) {
    case at::kHalf: return elementOf(at::Half(kNanf));
    case at::kBFloat16: return elementOf(at::BFloat16(kNanf));
    case at::kFloat: return elementOf(kNanf);
    case at::kDouble: return elementOf(kNan);
    case at::kComplexHalf:
      return elementOf(std::array<at::Half, 2>{at::Half(kNanf), at::Half(kNanf)});
    case at::kComplexFloat: return elementOf(std::array<float, 2>{kNanf, kNanf});
    case at::kComplexDouble: return elementOf(std::array<double, 2>{kNan, kNan});
    case at::kBool: return elementOf(true);
    default: {
      // A float8 without an infinity has this NaN; integers are large, and negative if signed.
      Element bytes{};
      bytes.fill(static_cast<char>(c10::isFloatingType(dtype) ? 0x7F : 0xA5));
      return bytes;
    }
  }
}

int64_t reachOf(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t last = 0;  // element with the highest address
  for (size_t i = 0; i < sizes.size(); ++i) {
    last += (sizes[i] - 1) * strides[i];
  }
  return last + 1;
}

// Returns whether a tensor on the CPU has memory. A subclass of Tensor shows its plain tensors to
// its own operators.
bool hasMemory(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         tensor.has_storage() && tensor.device().is_cpu() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Returns the address of the first element, and leaves memory that is shared until a write.
uint64_t addressOf(const at::Tensor& tensor) {
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto start = reinterpret_cast<uint64_t>(storage->_mutable_data_ptr_no_checks().get());
  return start + static_cast<uint64_t>(tensor.storage_offset()) * tensor.element_size();
}

uint64_t endOf(const at::Tensor& tensor, uint64_t begin) {
  const auto reach = static_cast<uint64_t>(reachOf(tensor.sizes(), tensor.strides()));
  return tensor.numel() == 0 ? begin : begin + reach * tensor.element_size();
}

void reportTo(const std::shared_ptr<LateFlight>& flight, const char* kind, const char* what) {
  const py::gil_scoped_acquire gil;
  py::handle(flight->issue.ptr(getPyInterpreter())).attr("report")(kind, what);
}

// Returns whether TorchWork.result has called C++. It waits, too, and may follow the program's own
// wait.
bool calledByResult() {
  const py::gil_scoped_acquire gil;
  auto* const frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return false;
  }
  static const PyObject* const kResult = py::object(
                                             py::module_::import("torchcomms_pg.work")
                                                 .attr("TorchWork")
                                                 .attr("result")
                                                 .attr("__code__"))
                                             .release()
                                             .ptr();
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  return code.ptr() == kResult;
}

}  // namespace

bool hasBytes(const at::Tensor& tensor) {
  return hasMemory(tensor) && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

void poison(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  if (!tensor.is_non_overlapping_and_dense()) {
    const at::Tensor dense = at::empty(tensor.sizes(), tensor.options());
    poison(dense);
    tensor.copy_(dense);
    return;
  }
  auto* const data = static_cast<char*>(tensor.mutable_data_ptr());
  const size_t size = tensor.nbytes();
  size_t done = tensor.element_size();
  std::memcpy(data, poisonOf(tensor.scalar_type()).data(), done);
  while (done < size) {
    const size_t more = std::min(done, size - done);
    std::memcpy(data + done, data, more);
    done += more;
  }
}

bool isPoison(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return true;
  }
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  const auto* const data = static_cast<const char*>(dense.const_data_ptr());
  const size_t width = dense.element_size();
  return std::memcmp(data, poisonOf(dense.scalar_type()).data(), width) == 0 &&
         std::memcmp(data, data + width, dense.nbytes() - width) == 0;  // all are equal
}

bool sameBytes(const at::Tensor& one, const at::Tensor& other) {
  const bool alike = one.is_non_overlapping_and_dense() && one.strides() == other.strides();
  const at::Tensor left = alike ? one : one.contiguous();
  const at::Tensor right = alike ? other : other.contiguous();
  return left.nbytes() == 0 ||
         std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

Span::Span(const at::Tensor& tensor)
    : begin_(addressOf(tensor)),
      end_(endOf(tensor, begin_)),
      dense_(reachOf(tensor.sizes(), tensor.strides()) == tensor.numel()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      offset_(tensor.storage_offset()),
      storage_(tensor.storage().getWeakStorageImpl()) {}

bool Span::freed() const {
  const auto storage = storage_.lock();
  const auto width = c10::elementSize(dtype_);
  const auto wanted = static_cast<uint64_t>(offset_) * width + (end_ - begin_);
  return storage == nullptr || (end_ > begin_ && storage->nbytes() < wanted);
}

bool Span::sharesBytes(const Span& other) const {
  if (begin_ >= other.end_ || other.begin_ >= end_) {
    return false;
  }
  if (dense_ && other.dense_) {
    return true;
  }
  const Unseen unseen;
  const uint64_t low = std::min(begin_, other.begin_);
  const uint64_t high = std::max(end_, other.end_);
  const at::Tensor marks = at::zeros({static_cast<int64_t>(high - low)}, at::kBool);
  bytesIn(marks, low).fill_(true);
  return other.bytesIn(marks, low).any().item<bool>();
}

at::Tensor Span::tensor() const {
  auto storage = storage_.lock();
  if (storage == nullptr || freed()) {
    return {};
  }
  const Unseen unseen;
  return at::empty({0}, dtype_).set_(c10::Storage(std::move(storage)), offset_, sizes_, strides_);
}

// Returns this span's bytes in a memory that begins at the address `low`.
at::Tensor Span::bytesIn(const at::Tensor& memory, uint64_t low) const {
  const auto width = static_cast<int64_t>(c10::elementSize(dtype_));
  auto sizes = sizes_;
  auto strides = strides_;
  for (auto& stride : strides) {
    stride *= width;
  }
  sizes.push_back(width);
  strides.push_back(1);
  return memory.as_strided(sizes, strides, static_cast<int64_t>(begin_ - low));
}

LateFlight::LateFlight(
    c10::SafePyObject issued, const std::vector<at::Tensor>& written,
    const std::vector<at::Tensor>& read, bool fromCompiledCode)
    : issue(std::move(issued)),
      outputs(written.begin(), written.end()),
      inputs(read.begin(), read.end()),
      compiled(fromCompiledCode),
      process(getpid()) {}

bool LateFlight::gone() const {
  const auto& spans = outputs.empty() ? inputs : outputs;
  return std::ranges::all_of(spans, &Span::freed);
}

namespace flights {

void add(std::shared_ptr<LateFlight> flight) {
  Registry& all = *registry.load(std::memory_order_acquire);
  bool full = false;
  {
    const std::unique_lock lock(all.mutex);
    all.flights.push_back(std::move(flight));
    all.any.store(true, std::memory_order_release);
    full = ++all.added % kSweep == 0;
  }
  if (full) {
    sweep();
  }
}

bool end(const LateFlight& flight) {
  Registry& all = *registry.load(std::memory_order_acquire);
  std::shared_ptr<LateFlight> removed;  // freed without the mutex: takes the GIL
  const std::unique_lock lock(all.mutex);
  const auto found =
      std::ranges::find_if(all.flights, [&](const auto& each) { return each.get() == &flight; });
  if (found == all.flights.end()) {
    return false;
  }
  removed = std::move(*found);
  all.flights.erase(found);
  all.any.store(!all.flights.empty(), std::memory_order_release);
  return true;
}

void forget() {
  Registry& all = *registry.load(std::memory_order_acquire);
  std::vector<std::shared_ptr<LateFlight>> removed;
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  if (lock.owns_lock()) {
    removed.swap(all.flights);
    all.any.store(false, std::memory_order_release);
    return;
  }
  // A thread that a forked child lacks may hold the mutex for ever.
  registry.store(new Registry, std::memory_order_release);
}

bool any() {
  return registry.load(std::memory_order_acquire)->any.load(std::memory_order_acquire);
}

bool concern(const at::Tensor& tensor) {
  if (!any() || !hasMemory(tensor) || tensor.numel() == 0) {
    return false;
  }
  const uint64_t begin = addressOf(tensor);
  const uint64_t end = endOf(tensor, begin);
  const auto touches = [&](const Span& span) { return begin < span.end() && span.begin() < end; };
  Registry& all = *registry.load(std::memory_order_acquire);
  const std::shared_lock lock(all.mutex);
  return std::ranges::any_of(all.flights, [&](const auto& each) {
    return std::ranges::any_of(each->outputs, touches) ||
           std::ranges::any_of(each->inputs, touches);
  });
}

bool concern(const std::vector<at::Tensor>& tensors) {
  return std::ranges::any_of(tensors, [](const at::Tensor& each) { return concern(each); });
}

std::vector<std::shared_ptr<LateFlight>> all() {
  Registry& all = *registry.load(std::memory_order_acquire);
  const std::shared_lock lock(all.mutex);
  return all.flights;
}

void sweep() {
  auto gone = all();
  std::erase_if(gone, [](const auto& each) { return !each->gone(); });
  for (const auto& each : gone) {
    if (end(*each) && each->compiled) {
      reportTo(each, "lost", "nothing waits for it");
    }
  }
}

}  // namespace flights

Delivery::Delivery(
    std::shared_ptr<LateFlight> flight, std::vector<at::Tensor> outputs,
    std::vector<at::Tensor> results, std::vector<at::Tensor> inputs, std::vector<at::Tensor> copies)
    : flight_(std::move(flight)),
      kept_{std::move(outputs), std::move(results), std::move(inputs), std::move(copies)} {
  flights::add(flight_);
}

void Delivery::awaited() {
  const bool again = !calledByResult() && waits_.fetch_add(1) > 0;
  if (getpid() != flight_->process) {
    reportTo(flight_, "process", "wait()");
  } else if (again) {
    reportTo(flight_, "again", "the second wait()");
  }
}

void Delivery::endWith(at::Tensor result) {
  if (at::Tensor output = flight_->outputs.front().tensor(); output.defined()) {
    const LockGuard lock(mutex_);
    kept_.outputs.push_back(std::move(output));
    kept_.results.push_back(std::move(result));
  }
  ended(true);
}

void Delivery::ended(bool ok, bool future) {
  if (getpid() != flight_->process) {
    return;  // a forked child has forgotten the flight, and a thread may hold the mutex for ever
  }
  std::optional<py::gil_scoped_release> released;  // a thread that holds the mutex may need the GIL
  if (PyGILState_Check() != 0) {
    released.emplace();
  }
  Kept dropped;
  std::vector<Finding> findings;
  bool told = false;
  {
    const LockGuard lock(mutex_);
    if (told_) {
      return;
    }
    told = told_ = !future || !ok || futures_ == 0;
    if (ok && !delivered_) {
      findings = deliver();
    }
    delivered_ = true;
    if (ok && told) {
      const auto more = checkInputs();
      findings.insert(findings.end(), more.begin(), more.end());
    }
    dropped.outputs.swap(kept_.outputs);
    dropped.results.swap(kept_.results);
    if (told) {
      dropped.inputs.swap(kept_.inputs);
      dropped.copies.swap(kept_.copies);
    }
  }
  for (const Finding& each : findings) {
    reportTo(flight_, each.kind, each.what);
  }
  if (told) {
    flights::end(*flight_);
  }
}

void Delivery::futureTaken() {
  const LockGuard lock(mutex_);
  ++futures_;
}

void Delivery::futurePassedOn() {
  bool over = false;
  {
    const LockGuard lock(mutex_);
    futures_ = 0;
    over = delivered_;
  }
  if (over) {
    ended(true);
  }
}

void Delivery::workDropped() {
  std::vector<at::Tensor> released;
  const LockGuard lock(mutex_);
  released.swap(kept_.inputs);
}

std::vector<Delivery::Finding> Delivery::deliver() {
  std::vector<Finding> findings;
  const Unseen unseen;
  for (size_t i = 0; i < kept_.outputs.size(); ++i) {
    if (flight_->outputs[i].freed()) {
      continue;
    }
    if (!flight_->touched && !isPoison(kept_.outputs[i])) {
      flight_->touched = true;
      findings.push_back({"changed", "its output has changed before the wait"});
    }
    kept_.outputs[i].copy_(kept_.results[i]);
  }
  return findings;
}

std::vector<Delivery::Finding> Delivery::checkInputs() {
  if (flight_->touched) {
    return {};
  }
  const Unseen unseen;
  for (size_t i = 0; i < flight_->inputs.size(); ++i) {
    const at::Tensor now = flight_->inputs[i].tensor();
    if (!now.defined()) {
      return {{"freed", "its input has been freed before the wait"}};
    }
    if (!sameBytes(now, kept_.copies[i])) {
      return {{"changed", "its input has changed before the wait"}};
    }
  }
  return {};
}

void bindLateFlights(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Span>(module, "Span")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def("freed", &Span::freed)
      .def("shares_bytes", &Span::sharesBytes, py::arg("other"), NoGil());
  py::class_<LateFlight, std::shared_ptr<LateFlight>>(module, "Flight")
      .def(
          py::init([](py::object issue, const std::vector<at::Tensor>& outputs,
                      const std::vector<at::Tensor>& inputs, bool compiled) {
            return std::make_shared<LateFlight>(
                c10::SafePyObject(issue.release().ptr(), getPyInterpreter()), outputs, inputs,
                compiled);
          }),
          py::arg("issue"), py::arg("outputs"), py::arg("inputs"), py::arg("compiled"))
      .def_property_readonly(
          "issue",
          [](const LateFlight& flight) {
            return py::reinterpret_borrow<py::object>(flight.issue.ptr(getPyInterpreter()));
          })
      .def_property_readonly("outputs", [](const LateFlight& flight) { return flight.outputs; })
      .def_property_readonly("inputs", [](const LateFlight& flight) { return flight.inputs; })
      .def_readwrite("process", &LateFlight::process)
      .def_property(
          "touched", [](const LateFlight& flight) { return flight.touched.load(); },
          [](LateFlight& flight, bool touched) { flight.touched = touched; });
  py::class_<Delivery, std::shared_ptr<Delivery>>(module, "Delivery")
      .def(
          py::init([](std::shared_ptr<LateFlight> flight, std::vector<at::Tensor> inputs,
                      std::vector<at::Tensor> copies) {
            return std::make_shared<Delivery>(
                std::move(flight), std::vector<at::Tensor>(), std::vector<at::Tensor>(),
                std::move(inputs), std::move(copies));
          }),
          py::arg("flight"), py::arg("inputs"), py::arg("copies"))
      .def_property_readonly("flight", &Delivery::flight)
      .def(
          "ended", [](Delivery& self, bool ok) { self.ended(ok); }, py::arg("ok"), NoGil())
      .def("end_with", &Delivery::endWith, py::arg("result"), NoGil())
      .def("future_taken", &Delivery::futureTaken, NoGil())
      .def("future_passed_on", &Delivery::futurePassedOn, NoGil())
      .def("work_dropped", &Delivery::workDropped, NoGil());
  module.def("any_flights", &flights::any);
  module.def("flights", &flights::all, NoGil());
  module.def("sweep_flights", &flights::sweep, NoGil());
  module.def("forget_flights", &flights::forget, NoGil());
  module.def(
      "poison",
      [](const at::Tensor& tensor) {
        const Unseen unseen;
        poison(tensor);
      },
      py::arg("tensor"), NoGil());
}

}  // namespace torchcomms_pg
