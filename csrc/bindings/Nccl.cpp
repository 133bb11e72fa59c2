// libnccl, for torchcomms_pg/nccl.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/Bindings.hpp"
#include "connect/Rendezvous.hpp"
#include "nccl/Config.hpp"
#include "nccl/Libnccl.hpp"

namespace torchcomms_pg {

namespace {

std::optional<NcclConfig::Value> valueOf(const NcclConfig::Field& field, const py::object& value) {
  if (value.is_none()) {
    return std::nullopt;
  }
  if (field.isText() && py::isinstance<py::str>(value)) {
    return value.cast<std::string>();
  }
  if (!field.isText() && py::isinstance<py::int_>(value)) {
    return value.cast<int>();
  }
  throw py::type_error(
      std::string("config.") + field.name + " is " + py::repr(value).cast<std::string>() +
      ", wanted " + (field.isText() ? "a str" : "an int") + ", or None for NCCL's default");
}

std::string docOf(const NcclConfig::Field& field) {
  return std::string(field.isText() ? "str" : "int") + " or None: " + field.inNccl +
         " of ncclConfig_t, " + field.range() + ", from NCCL " + versionText(field.since) +
         " on. None: NCCL's default.";
}

std::string reprOf(const NcclConfig& config) {
  std::string set;
  for (const auto& field : NcclConfig::fields()) {
    if (const auto value = config.value(field)) {
      set += std::string(set.empty() ? "" : ", ") + field.name + "=" +
             py::repr(py::cast(*value)).cast<std::string>();
    }
  }
  return "NcclConfig(" + set + ")";
}

void bindConfig(py::module_& module) {
  py::class_<NcclConfig> config(
      module, "NcclConfig",
      "Settings of a communicator for NCCL: the fields of its ncclConfig_t, by the names of "
      "torch's ProcessGroupNCCL.NCCLConfig.\n\nNCCL's documentation says what they mean, and "
      "NCCL's environment variables go first. A value that NCCL does not take raises ValueError; a "
      "field that is newer than the loaded library raises RuntimeError when a communicator is "
      "made.");
  config.def(py::init<>(), "Makes settings that leave everything to NCCL.")
      .def("__repr__", [](const NcclConfig& self) { return reprOf(self); })
      .def("__copy__", [](const NcclConfig& self) { return NcclConfig(self); })
      .def(
          "__deepcopy__", [](const NcclConfig& self, const py::dict&) { return NcclConfig(self); },
          py::arg("memo"));
  py::dict hints;
  for (const auto& field : NcclConfig::fields()) {
    hints[field.inNccl] = field.name;
    hints[field.name] = field.name;
    config.def_property(
        field.name, [&field](const NcclConfig& self) { return self.value(field); },
        [&field](NcclConfig& self, const py::object& value) {
          self.set(field, valueOf(field, value));
        },
        docOf(field).c_str());
  }
  module.attr("nccl_config_names") = std::move(hints);
}

}  // namespace

void bindNccl(py::module_& module) {
  bindConfig(module);
  // Libraries are never freed: see Libnccl.
  py::class_<Libnccl, std::unique_ptr<Libnccl, py::nodelete>>(module, "NcclLibrary")
      .def_property_readonly("path", &Libnccl::path)
      .def_property_readonly("version", &Libnccl::version)
      .def_property_readonly("origin", &Libnccl::origin)
      .def_property_readonly("missing", &Libnccl::missing);
  module.def(
      "load_nccl",
      [](const std::string& path, const std::string& folder) {
        return &Libnccl::load({.path = path, .folder = folder});
      },
      py::arg("path"), py::arg("folder"), py::return_value_policy::reference,
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "meet_over_nccl",
      [](const Libnccl& library, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         const std::string& name, Milliseconds timeout, int ranksPerRoot, int peer) {
        RendezvousInfo info{store, rank, size, {}, name, timeout};
        info.group.name = name;
        info.peer = peer;
        NcclRendezvous met;
        {
          py::gil_scoped_release release;
          met = rendezvousOverNccl(library, info, ranksPerRoot);
        }
        std::vector<py::bytes> ids;
        for (const auto& id : met.ids) {
          ids.emplace_back(id.internal, sizeof(id.internal));
        }
        return ids;
      },
      py::arg("library"), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("name"),
      py::arg("timeout"), py::arg("ranks_per_root"), py::arg("peer") = -1);
}

}  // namespace torchcomms_pg
