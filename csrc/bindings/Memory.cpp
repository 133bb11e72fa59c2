// Memory pools, for torch.cuda.MemPool and torchcomms_pg/memory.py.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/Backend.hpp"
#include "bindings/Bindings.hpp"
#include "nccl/Libnccl.hpp"

namespace torchcomms_pg {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

py::object memory(const char* function) {
  return py::module_::import("torchcomms_pg.memory").attr(function);
}

Registrations::Pool idOf(const py::object& pool) {
  return pool.attr("id").cast<Registrations::Pool>();
}

void registerPool(Backend& self, const py::object& pool, bool symmetric) {
  std::map<int, std::vector<PoolSegment>> segments;
  for (const auto& segment : pool.attr("snapshot")()) {
    segments[segment["device"].cast<int>()].push_back(
        {reinterpret_cast<void*>(segment["address"].cast<uintptr_t>()),
         segment["total_size"].cast<size_t>()});
  }
  constexpr const char* kEmpty =
      "register_mem_pool: the pool has no memory yet, and what it takes later is not registered by "
      "itself; call it again when it has some";
  if (segments.empty() && PyErr_WarnEx(PyExc_UserWarning, kEmpty, 1) != 0) {
    throw py::error_already_set();
  }
  const auto id = idOf(pool);
  py::gil_scoped_release release;
  self.registerPool(id, segments, symmetric);
}

}  // namespace

void bindMemory(py::module_& module) {
  module.def("allocate_with", &allocateWith, py::arg("library"));

  // Extends the class Backend, whose other methods bindings.cpp binds.
  py::class_<Backend>(module.attr("Backend"))
      .def_property_readonly(
          "mem_allocator",
          [](const py::object& self) { return memory("allocator")(self.attr("options")); })
      .def(
          "supports_tensor_alloc",
          [](const py::object& self, const py::object& device) {
            return memory("can_allocate")(self.attr("options"), device);
          },
          py::arg("device"))
      .def(
          "allocate_tensor",
          [](const py::object& self, int64_t size, const py::object& dtype,
             const py::object& device) {
            return memory("allocate_tensor")(self, size, dtype, device);
          },
          py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"))
      .def("register_mem_pool", &registerPool, py::arg("pool"), py::arg("symm") = false)
      .def(
          "deregister_mem_pool",
          [](Backend& self, const py::object& pool) {
            const auto id = idOf(pool);
            py::gil_scoped_release release;
            self.deregisterPool(id);
          },
          py::arg("pool"))
      .def("suspend", &Backend::suspend, NoGil())
      .def("resume", &Backend::resume, NoGil())
      .def("memory_stats", &Backend::getMemoryStats, NoGil());
}

}  // namespace torchcomms_pg
