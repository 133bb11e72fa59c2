// libnccl, for torchcomms_pg/nccl.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/Bindings.hpp"
#include "comm/Bootstrap.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

void bindNccl(py::module_& module) {
  // Never freed: see Library.
  py::class_<Library, std::unique_ptr<Library, py::nodelete>>(module, "NcclLibrary")
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version", &Library::version)
      .def_property_readonly("origin", &Library::origin)
      .def_property_readonly("missing", &Library::missing);
  module.def(
      "load_nccl",
      [](const std::string& path, const std::string& folder) {
        return &Library::load({.path = path, .folder = folder});
      },
      py::arg("path"),
      py::arg("folder"),
      py::return_value_policy::reference,
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "meet_over_nccl",
      [](const Library& library,
         const c10::intrusive_ptr<c10d::Store>& store,
         int rank,
         int size,
         const std::string& name,
         Milliseconds timeout) {
        Meeting meeting{store, rank, size, {}, name, timeout};
        meeting.group.name = name;
        ncclUniqueId id;
        {
          py::gil_scoped_release release;
          id = meetOverNccl(library, meeting).id;
        }
        return py::bytes(id.internal, sizeof(id.internal));
      },
      py::arg("library"),
      py::arg("store"),
      py::arg("rank"),
      py::arg("size"),
      py::arg("name"),
      py::arg("timeout"));
}

}  // namespace torchcomms_pg
