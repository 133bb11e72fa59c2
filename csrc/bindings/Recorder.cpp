// The flight recorder, for torchcomms_pg/hooks/flight_recorder.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings/Bindings.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

Recorder::What entries(bool completed) {
  Recorder::What what;
  what.completed = completed;
  return what;
}

}  // namespace

void bindRecorder(py::module_& module) {
  usePythonStacks();
  py::class_<Recorder, std::shared_ptr<Recorder>>(module, "Recorder")
      .def(py::init<size_t, bool>(), py::arg("max_entries"), py::arg("cpp_stacks"))
      .def_property_readonly("enabled", &Recorder::enabled)
      .def_property_readonly("size", &Recorder::size)
      .def_property_readonly("rank", &Recorder::rank)
      .def("reset", &Recorder::reset, NoGil())
      .def(
          "json",
          [](const Recorder& self, bool completed) { return self.json(entries(completed)); },
          py::arg("completed"),
          NoGil())
      .def(
          "write",
          [](const Recorder& self, const std::string& path, bool completed) {
            writeDump(path, self.pickle(entries(completed)));
          },
          py::arg("path"),
          py::arg("completed"),
          NoGil());

  module.def(
      "configure_recorder",
      [](size_t maxEntries,
         bool cppStacks,
         std::string prefix,
         bool onFailure,
         std::chrono::milliseconds patience,
         bool stacks,
         bool completed,
         std::string pipe) {
        Recorder::What what;
        what.stacks = stacks;
        what.completed = completed;
        process_recorder::configure(
            maxEntries, cppStacks, {std::move(prefix), onFailure, patience, what, std::move(pipe)});
      },
      py::kw_only(),
      py::arg("max_entries"),
      py::arg("cpp_stacks"),
      py::arg("prefix"),
      py::arg("on_failure"),
      py::arg("patience"),
      py::arg("stacks"),
      py::arg("completed"),
      py::arg("pipe"));
  module.def("process_recorder", &process_recorder::get);

  py::class_<Comm> comm(module.attr("Communicator"));
  comm.def(
          "record",
          [](Comm& self, std::shared_ptr<Recorder> recorder) {
            return self->recorders().add(std::move(recorder));
          },
          py::arg("recorder"),
          NoGil())
      .def(
          "stop_recording",
          [](Comm& self, const Recorder& recorder) { self->recorders().remove(&recorder); },
          py::arg("recorder"),
          NoGil());
}

}  // namespace torchcomms_pg
