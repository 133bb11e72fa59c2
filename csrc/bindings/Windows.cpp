// Windows, for torchcomms_pg/window.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/Bindings.hpp"
#include "window/SharedTensor.hpp"
#include "window/Window.hpp"

namespace torchcomms_pg {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using HeldWindow = Held<Window>;
using Timeout = std::optional<Milliseconds>;
using Result = c10::intrusive_ptr<c10d::Work>;

}  // namespace

void bindWindows(py::module_& module) {
  // Extends the class Communicator, whose operations Communicator.cpp binds.
  py::class_<Comm>(module.attr("Communicator"))
      .def(
          "new_window",
          [](Comm& self) { return std::make_unique<HeldWindow>(Window::make(self.shared())); },
          NoGil())
      .def(
          "allocate_tensor",
          [](Comm& self, int64_t size, at::ScalarType dtype) {
            return makeSharedTensor("allocate_tensor", self->api(), size, dtype, self->device());
          },
          py::arg("size"), py::arg("dtype"), NoGil());

  py::class_<HeldWindow>(module, "Window")
      .def(
          "tensor_register",
          [](HeldWindow& self, const at::Tensor& tensor, bool owning) {
            self->registerTensor(tensor, owning);
          },
          py::arg("tensor"), py::arg("owning"), NoGil())
      .def(
          "tensor_deregister", [](HeldWindow& self) { self->deregister(); }, NoGil())
      .def(
          "put",
          [](HeldWindow& self, const at::Tensor& tensor, int64_t dst, int64_t offset, bool async,
             Timeout timeout) -> Result {
            return self->put(tensor, dst, offset, {.async = async, .timeout = timeout});
          },
          py::arg("tensor"), py::arg("dst_rank"), py::arg("offset"), py::arg("async_op"),
          py::arg("timeout"), NoGil())
      .def(
          "signal",
          [](HeldWindow& self, int64_t peer, bool async, Timeout timeout) -> Result {
            return self->signal(peer, {.async = async, .timeout = timeout});
          },
          py::arg("dst_rank"), py::arg("async_op"), py::arg("timeout"), NoGil())
      .def(
          "wait_signal",
          [](HeldWindow& self, int64_t peer, bool async, Timeout timeout) -> Result {
            return self->waitSignal(peer, {.async = async, .timeout = timeout});
          },
          py::arg("peer_rank"), py::arg("async_op"), py::arg("timeout"), NoGil())
      .def(
          "map_remote_tensor",
          [](HeldWindow& self, int64_t rank) { return self->mapRemoteTensor(rank); },
          py::arg("rank"), NoGil())
      .def(
          "check_rank",
          [](HeldWindow& self, const std::string& what, const std::string& argument, int64_t rank) {
            self->checkRank(what.c_str(), argument.c_str(), rank);
          },
          py::arg("what"), py::arg("argument"), py::arg("rank"))
      .def_property_readonly("tensor", [](HeldWindow& self) { return self->tensor(); })
      .def_property_readonly(
          "dtype",
          [](HeldWindow& self) {
            const auto part = self->part();
            return part ? std::optional(part->dtype) : std::nullopt;
          })
      .def_property_readonly("device", [](HeldWindow& self) { return self->device(); })
      .def_property_readonly("shape", [](HeldWindow& self) {
        const auto part = self->part();
        return part ? std::optional(part->sizes) : std::nullopt;
      });
}

}  // namespace torchcomms_pg
