// The sums over this process's operations, for torchcomms_pg/metrics.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <chrono>

#include "bindings/Bindings.hpp"
#include "diagnosis/group/ProcessTotals.hpp"

namespace torchcomms_pg {

namespace {

double seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

void bindMetrics(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using process_totals::Group;
  using process_totals::Totals;

  py::class_<Group::Operation>(module, "OperationTotals")
      .def_property_readonly("name", [](const Group::Operation& self) { return name(self.kind); })
      .def_property_readonly(
          "ended", [](const Group::Operation& self) { return self.sums.operations; })
      .def_property_readonly(
          "failures", [](const Group::Operation& self) { return self.sums.failures; })
      .def_property_readonly("bytes", [](const Group::Operation& self) { return self.sums.bytes; })
      .def_property_readonly(
          "seconds", [](const Group::Operation& self) { return seconds(self.sums.lasted); })
      .def_property_readonly(
          "waited", [](const Group::Operation& self) { return seconds(self.sums.waited); });
  py::class_<Group>(module, "GroupTotals")
      .def_readonly("name", &Group::name)
      .def_readonly("backend", &Group::backend)
      .def_readonly("watched", &Group::watched)
      .def_readonly("live", &Group::live)
      .def_readonly("in_flight", &Group::inFlight)
      .def_property_readonly("oldest", [](const Group& self) { return seconds(self.oldest); })
      .def_readonly("failures", &Group::failures)
      .def_readonly("lateness", &Group::lateness)
      .def_readonly("operations", &Group::operations);
  py::class_<Totals>(module, "ProcessTotals")
      .def_readonly("rank", &Totals::rank)
      .def_readonly("groups", &Totals::groups);
  module.def("process_totals", &process_totals::read, NoGil());
  module.def(
      "await_failure", &process_totals::awaitFailure, py::arg("written"), py::arg("patience"),
      NoGil());
  module.def("end_metrics_writer", &process_totals::endWriter, NoGil());
}

}  // namespace torchcomms_pg
