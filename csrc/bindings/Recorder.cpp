// The flight recorder, for torchcomms_pg/hooks/flight_recorder.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings/Bindings.hpp"
#include "recorder/MessageBatch.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

FlightRecorder::What entries(bool completed, bool collectives, bool stacks) {
  FlightRecorder::What what;
  what.entries = collectives;
  what.completed = completed;
  what.stacks = stacks;
  return what;
}

}  // namespace

void bindRecorder(py::module_& module) {
  usePythonStacks(module);
  py::class_<FlightRecorder, std::shared_ptr<FlightRecorder>>(module, "Recorder")
      .def(py::init<size_t, bool>(), py::arg("max_entries"), py::arg("cpp_stacks"))
      .def_property_readonly("enabled", &FlightRecorder::enabled)
      .def_property_readonly("size", &FlightRecorder::size)
      .def_property_readonly("rank", &FlightRecorder::rank)
      .def("reset", &FlightRecorder::reset, NoGil())
      .def(
          "json",
          [](const FlightRecorder& self, bool completed, bool collectives) {
            return self.json(entries(completed, collectives, /*stacks=*/false));
          },
          py::arg("completed") = true, py::arg("collectives") = true, NoGil())
      .def(
          "write",
          [](const FlightRecorder& self, const std::string& path, bool completed, bool collectives,
             bool stacks) {
            writeDump(path, self.pickle(entries(completed, collectives, stacks)));
          },
          py::arg("path"), py::arg("completed") = true, py::arg("collectives") = true,
          py::arg("stacks") = true, NoGil());

  module.def(
      "configure_recorder",
      [](size_t maxEntries, bool cppStacks, std::string prefix, bool onFailure,
         std::chrono::milliseconds patience, bool stacks, bool completed, std::string pipe) {
        FlightRecorder::What what;
        what.stacks = stacks;
        what.threads = true;
        what.completed = completed;
        process_recorder::configure(
            maxEntries, cppStacks, {std::move(prefix), onFailure, patience, what, std::move(pipe)});
      },
      py::kw_only(), py::arg("max_entries"), py::arg("cpp_stacks"), py::arg("prefix"),
      py::arg("on_failure"), py::arg("patience"), py::arg("stacks"), py::arg("completed"),
      py::arg("pipe"));
  module.def("process_recorder", &process_recorder::get);
  module.def("set_message_batch", &MessageBatch::set, py::arg("open"));

  py::class_<Comm> comm(module.attr("Communicator"));
  comm.def(
          "record",
          [](Comm& self, std::shared_ptr<FlightRecorder> recorder) {
            return self->recorders().add(std::move(recorder));
          },
          py::arg("recorder"), NoGil())
      .def(
          "stop_recording",
          [](Comm& self, const FlightRecorder& recorder) { self->recorders().remove(&recorder); },
          py::arg("recorder"), NoGil());
}

}  // namespace torchcomms_pg
