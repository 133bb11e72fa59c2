// Python's view of one issued operation.
#include "comm/Work.hpp"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/Bindings.hpp"
#include "bindings/LateWork.hpp"
#include "operation/CommError.hpp"

namespace torchcomms_pg {

namespace {

const char* stateOf(c10d::Work& work) {
  if (!work.isCompleted()) {
    auto* const late = dynamic_cast<LateWork*>(&work);
    const auto* const ours = dynamic_cast<const Work*>(late == nullptr ? &work : &late->real());
    return ours == nullptr || ours->launched() ? "INPROGRESS" : "NOT_STARTED";
  }
  try {
    if (const auto error = work.exception()) {
      std::rethrow_exception(error);
    }
  } catch (const CommError& error) {
    return error.failure().type == c10d::ErrorType::TIMEOUT ? "TIMEDOUT" : "ERROR";
  } catch (...) {
    return "ERROR";
  }
  return "COMPLETED";
}

}  // namespace

void bindWork(py::module_& module) {
  // Python objects of a Work have this class even if torch's functions return c10d::Work, since
  // pybind11 goes by the C++ type of the object.
  py::class_<Work, NoGilDestructor<Work>, c10d::Work>(module, "Work")
      .def(
          "__repr__",
          [](Work& work) {
            return "Work(" + work.text() + ", timeout " + inSeconds(work.operation().timeout) +
                   ", " + stateOf(work) + ")";
          })
      // A copy is the Work itself, as in torchcomms_pg/handle.py.
      .def("__copy__", [](py::object self) { return self; })
      .def("__deepcopy__", [](py::object self, const py::dict&) { return self; }, py::arg("memo"));
  module.def(
      "work_state", [](c10d::Work& work) { return std::string(stateOf(work)); }, py::arg("work"));
  module.def(
      "work_wait_blocking",
      [](c10d::Work& work, std::optional<Milliseconds> timeout) {
        if (auto* const late = dynamic_cast<LateWork*>(&work)) {
          late->wait(timeout.value_or(kNoTimeout));  // of a tensor on the CPU: the host waits
          return;
        }
        auto* const ours = dynamic_cast<Work*>(&work);
        TORCH_CHECK_TYPE(ours != nullptr, "wait_blocking: this work is of another backend");
        ours->waitOnHost(timeout.value_or(kNoTimeout));
      },
      py::arg("work"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "work_error",
      [](c10d::Work& work) { return pythonError(work.isCompleted() ? work.exception() : nullptr); },
      py::arg("work"));
}

}  // namespace torchcomms_pg
