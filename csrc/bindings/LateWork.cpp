#include "bindings/LateWork.hpp"

#include <ATen/Functions.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "bindings/Bindings.hpp"

namespace torchcomms_pg {

namespace {

// The operations of the batches that this thread has open.
thread_local std::map<const void*, std::vector<LatePart>> openBatches;

std::vector<at::Tensor> clonesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> clones;
  clones.reserve(tensors.size());
  for (const auto& each : tensors) {
    clones.push_back(each.clone());
  }
  return clones;
}

// Returns the key of a batch of a process group, or of another object of Python.
const void* keyOf(const py::object& batch) {
  if (py::isinstance<c10d::ProcessGroup>(batch)) {
    return batch.cast<c10d::ProcessGroup*>();
  }
  return batch.ptr();
}

}  // namespace

bool LateWork::isCompleted() {
  const bool over = real_->isCompleted();
  if (over) {
    ended(real_->isSuccess());
  }
  return over;
}

std::vector<at::Tensor> LateWork::result() {
  std::vector<at::Tensor> value;
  endWith([&] { value = real_->result(); });
  return withOutputs(at::IValue(value)).toTensorVector();
}

void LateWork::synchronize() {
  endWith([&] { real_->synchronize(); });
}

bool LateWork::wait(std::chrono::milliseconds timeout) {
  for (const LatePart& part : parts_) {
    part.delivery->awaited();
  }
  bool result = false;
  endWith([&] { result = real_->wait(timeout); });
  return result;
}

void LateWork::blockCurrentStream() {
  endWith([&] { real_->blockCurrentStream(); });
}

c10::intrusive_ptr<c10::ivalue::Future> LateWork::getFuture() {
  auto self = c10::intrusive_ptr<LateWork>::unsafe_reclaim_from_nonowning(this);
  const auto future = real_->getFuture();
  return future->then(
      [self = std::move(self)](c10::ivalue::Future& over) {
        for (const LatePart& part : self->parts_) {
          part.delivery->ended(!over.hasError(), /*future=*/true);
        }
        return self->withOutputs(over.value());  // raises the operation's error
      },
      future->elementType());
}

c10::intrusive_ptr<c10::ivalue::Future> LateWork::getFutureResult() {
  auto self = c10::intrusive_ptr<LateWork>::unsafe_reclaim_from_nonowning(this);
  const auto future = real_->getFutureResult();
  return future->then(
      [self = std::move(self)](c10::ivalue::Future& over) {
        self->ended(self->isSuccess());
        return over.value();
      },
      future->elementType());
}

void LateWork::endWith(const std::function<void()>& wait) const {
  try {
    wait();
  } catch (...) {
    ended(false);
    throw;
  }
  ended(true);
}

void LateWork::ended(bool ok) const {
  for (const LatePart& part : parts_) {
    part.delivery->ended(ok);
  }
}

at::IValue LateWork::withOutputs(const at::IValue& value) const {
  if (!value.isTensorList()) {
    return value;
  }
  auto tensors = value.toTensorVector();
  for (auto& tensor : tensors) {
    for (const LatePart& part : parts_) {
      for (size_t i = 0; i < part.results.size(); ++i) {
        if (part.results[i].is_same(tensor)) {
          tensor = part.outputs[i];
        }
      }
    }
  }
  return tensors;
}

std::optional<c10::SafePyObject> showCall(const c10::SafePyObject& issued, const LateCall& call) {
  const auto& [name, group, description, outputs, inputs, async] = call;
  const bool covered =
      std::ranges::all_of(outputs, hasBytes) && std::ranges::all_of(inputs, hasBytes);
  if (!async && covered && !flights::concern(outputs) && !flights::concern(inputs)) {
    return std::nullopt;
  }
  const auto& described = outputs.empty() ? inputs : outputs;
  const auto elements = [](int64_t sum, const at::Tensor& each) { return sum + each.numel(); };
  const py::gil_scoped_acquire gil;
  py::object dtype = described.empty() ? py::none() : py::cast(described.front().scalar_type());
  c10::SafePyObject issue(
      py::handle(issued.ptr(getPyInterpreter()))(
          name, std::accumulate(described.begin(), described.end(), int64_t{0}, elements),
          std::move(dtype), group, description, async && covered, covered)
          .release()
          .ptr(),
      getPyInterpreter());
  if (covered && !async) {
    overlaps(issue, outputs, inputs);
  }
  return async && covered ? std::optional(std::move(issue)) : std::nullopt;
}

bool overlaps(
    const c10::SafePyObject& issue, const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs) {
  if (!flights::concern(outputs) && !flights::concern(inputs)) {
    return false;
  }
  const py::gil_scoped_acquire gil;
  return py::handle(issue.ptr(getPyInterpreter())).attr("overlaps")(outputs, inputs).cast<bool>();
}

C10dWork issueLate(
    c10::SafePyObject issue, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
    const IssueCall& call, const void* batch) {
  const bool shared = overlaps(issue, outputs, inputs);
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> given;
  std::vector<at::Tensor> copies;
  {
    const Unseen unseen;
    results = clonesOf(outputs);
    given = clonesOf(inputs);
    copies = clonesOf(inputs);  // a backend may write into what it only has to read
  }
  auto work = call(results, given);
  for (const auto& each : outputs) {
    each.mutable_data_ptr();  // moves memory that is shared until a write, before spans are taken
  }
  auto flight = std::make_shared<LateFlight>(std::move(issue), outputs, inputs, false);
  flight->touched = shared;
  {
    const Unseen unseen;
    std::ranges::for_each(outputs, poison);
  }
  // Results of the work may be its inputs: at the root of a broadcast, for example.
  LatePart late{nullptr, results.empty() ? given : results, outputs.empty() ? inputs : outputs};
  // An input may share bytes with an output: in place, only its own bytes count.
  const auto sharing = [&](const Span& input) {
    return std::ranges::any_of(
        flight->outputs, [&](const Span& output) { return input.sharesBytes(output); });
  };
  if (std::ranges::any_of(flight->inputs, sharing)) {
    flight->inputs.clear();
    inputs.clear();
    copies.clear();
  }
  late.delivery = std::make_shared<Delivery>(
      std::move(flight), std::move(outputs), std::move(results), std::move(inputs),
      std::move(copies));
  if (const auto open = openBatches.find(batch); open != openBatches.end()) {
    open->second.push_back(late);
  }
  if (work == nullptr) {
    return nullptr;
  }
  return c10::make_intrusive<LateWork>(std::move(work), std::vector<LatePart>{std::move(late)});
}

void bindLateWork(py::module_& module) {
  py::class_<LateWork, NoGilDestructor<LateWork>, c10d::Work>(module, "LateWork")
      .def_property_readonly("deliveries", [](const LateWork& work) {
        std::vector<std::shared_ptr<Delivery>> deliveries;
        for (const LatePart& part : work.parts()) {
          deliveries.push_back(part.delivery);
        }
        return deliveries;
      });
  module.def(
      "open_late_batch", [](const py::object& batch) { openBatches.try_emplace(keyOf(batch)); },
      py::arg("batch"));
  module.def(
      "cancel_late_batch",
      [](const py::object& batch) {
        if (const auto open = openBatches.extract(keyOf(batch))) {
          for (const LatePart& part : open.mapped()) {
            part.delivery->ended(false);
          }
        }
      },
      py::arg("batch"));
  module.def(
      "close_late_batch",
      [](const py::object& batch, C10dWork work) -> C10dWork {
        auto open = openBatches.extract(keyOf(batch));
        if (work == nullptr || open.empty() || open.mapped().empty()) {
          return work;
        }
        return c10::make_intrusive<LateWork>(std::move(work), std::move(open.mapped()));
      },
      py::arg("batch"), py::arg("work"));
}

}  // namespace torchcomms_pg
