// The extension module, torchcomms_pg._C in Python. Its file is named after torch's minor version,
// so that one wheel can hold builds for several versions: see setup.py.
#include <c10/util/Logging.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/Backend.hpp"
#include "base/ExitGuard.hpp"
#include "bindings/Bindings.hpp"
#include "diagnosis/dumps/ControlPlane.hpp"
#include "diagnosis/dumps/DumpPipe.hpp"
#include "diagnosis/group/Observation.hpp"
#include "diagnosis/status/StatusServer.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

// Makes a backend while the GIL is released. A call guard would release the GIL for too long, since
// pybind11 registers the new object in a table that the GIL guards.
template <class... Args>
NoGilDestructor<Backend> makeBackend(Args&&... args) {
  py::gil_scoped_release release;
  return NoGilDestructor<Backend>(c10::make_intrusive<Backend>(std::forward<Args>(args)...));
}

// Runs at the interpreter's exit, while other threads can still take the GIL (see ExitGuard). Waits
// for their tasks, and aborts the operations that do not end within kGrace.
void finishBeforeExit() {
  DumpPipe::removeAtExit();
  status::StatusServer::removeAtExit();
  constexpr std::chrono::seconds kGrace{2};     // time for peers that are about to arrive
  constexpr std::chrono::seconds kPatience{5};  // time for tasks that have begun, such as hooks
  if (!ExitGuard::awaitNone(kGrace)) {
    Monitor::get().abortInFlight("the end of its Python interpreter");
  }
  ExitGuard::close();
  ExitGuard::awaitNone(kPatience);
  awaitPrinted(kGrace);
}

}  // namespace

}  // namespace torchcomms_pg

PYBIND11_MODULE(TORCHCOMMS_PG_MODULE, module) {
  using namespace torchcomms_pg;
  using NoGil = py::call_guard<py::gil_scoped_release>;

  module.attr("__name__") = "torchcomms_pg._C";  // set before the classes, which copy the name

  py::module_::import("torch._C._distributed_c10d");  // registers the base classes

  module.attr("torch_version") = TORCHCOMMS_PG_TORCH_VERSION;
  module.attr("nccl_header_version") = NCCL_VERSION_CODE;

  py::module_::import("atexit").attr("register")(py::cpp_function(finishBeforeExit, NoGil()));

  module.def("log_info", [](const std::string& text) { LOG(INFO) << text; }, py::arg("text"));
  observeProcess();
  registerControlPlane();
  bindErrors(module);
  bindWork(module);
  bindLateFlights(module);
  bindLateWork(module);
  bindLateMethods(module);
  bindOperatorGate(module);
  bindInterrupts();
  bindHooks(module);
  bindCommunicator(module);
  bindWindows(module);
  bindRecorder(module);
  bindCreation(module);
  bindNccl(module);
  bindFrames(module);
  bindPythonStackDump(module);
  bindParting(module);
  bindWatch(module);
  bindMetrics(module);

  py::class_<Backend, NoGilDestructor<Backend>, c10d::Backend> backend(module, "Backend");

  py::class_<GroupOptions, c10::intrusive_ptr<GroupOptions>, c10d::Backend::Options>(
      backend, "Options",
      "Options that ``pg_options`` of ``init_process_group`` takes for this backend; "
      "``timeout`` is how long an operation may take before the group fails.")
      .def(
          py::init([](std::chrono::milliseconds timeout, std::string name) {
            return c10::make_intrusive<GroupOptions>(timeout, std::move(name));
          }),
          py::arg("timeout") = kBackendDefaultTimeout, py::arg("name") = kBackendName)
      .def_property(
          "nccl_library", [](const GroupOptions& self) { return self.accelerator.library.path; },
          [](GroupOptions& self, std::string path) {
            self.accelerator.library.path = std::move(path);
          })
      .def_property(
          "nccl_folder", [](const GroupOptions& self) { return self.accelerator.library.folder; },
          [](GroupOptions& self, std::string folder) {
            self.accelerator.library.folder = std::move(folder);
          })
      .def_property(
          "is_high_priority_stream",
          [](const GroupOptions& self) { return self.accelerator.highPriority; },
          [](GroupOptions& self, bool high) { self.accelerator.highPriority = high; })
      .def_property(
          "config",
          py::cpp_function(
              [](GroupOptions& self) -> NcclConfig& { return self.accelerator.config; },
              py::return_value_policy::reference_internal),
          [](GroupOptions& self, const NcclConfig& config) { self.accelerator.config = config; })
      .def_property(
          "ranks_per_root", [](const GroupOptions& self) { return self.accelerator.ranksPerRoot; },
          [](GroupOptions& self, int ranks) { self.accelerator.ranksPerRoot = ranks; })
      .def_readwrite("blocking_wait", &GroupOptions::blockingWait)
      .def_readwrite("nan_check", &GroupOptions::nanCheck)
      .def_readwrite("abort_process_on_timeout_or_error", &GroupOptions::endsProcess)
      .def_readwrite("accelerator_ends_process", &GroupOptions::acceleratorEnds)
      .def(
          "__repr__",
          [](const py::object& self) {
            std::string text =
                "Backend.Options(timeout=" + std::string(py::repr(self.attr("_timeout")));
            for (const auto* const name :
                 {"is_high_priority_stream", "config", "blocking_wait", "nan_check",
                  "abort_process_on_timeout_or_error", "nccl_library"}) {
              text += std::string(", ") + name + "=" + std::string(py::repr(self.attr(name)));
            }
            return text + ")";
          })
      .def(
          "__copy__",
          [](const GroupOptions& self) { return c10::make_intrusive<GroupOptions>(self); })
      .def(
          "__deepcopy__",
          [](const GroupOptions& self, const py::dict&) {
            return c10::make_intrusive<GroupOptions>(self);
          },
          py::arg("memo"));

  backend
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      const c10::intrusive_ptr<GroupOptions>& options) {
            auto own = c10::make_intrusive<GroupOptions>(*options);
            own->connectGloo = glooConnector(own->group_name, own->timeout);
            return makeBackend(store, rank, size, std::move(own));
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(
          py::init([](const Comm& communicator, c10::intrusive_ptr<GroupOptions> options) {
            return makeBackend(communicator.shared(), std::move(options));
          }),
          py::arg("communicator"), py::arg("options"))
      .def_property_readonly(
          "options",
          [](Backend& self) {
            return c10::static_intrusive_pointer_cast<GroupOptions>(self.getBackendOptions());
          })
      .def(
          "communicator",
          [](Backend& self, const at::Device& device) {
            return std::make_unique<Comm>(self.communicator("get_comm", device));
          },
          py::arg("device"), NoGil())
      .def("get_error", &Backend::getError)  // torch binds this and the next from 2.14 on
      .def("_add_ephemeral_timeout", &Backend::addEphemeralTimeout, py::arg("timeout"))
      .def("_enable_collectives_timing", &Backend::enableCollectivesTiming, NoGil())
      .def("_set_enable_nan_check", &Backend::enableNanCheck, py::arg("enable_nan_check"), NoGil())
      .def("_group_start", &Backend::startCoalescing, NoGil())
      .def(
          "_group_end", [](Backend& self) { self.endCoalescing(); }, NoGil())
      .def_static(
          "get_build_nccl_version",
          [] { return std::make_tuple(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH); })
      .def_static(
          "get_runtime_nccl_version",
          [] { return py::module_::import("torchcomms_pg.nccl").attr("version")(); })
      .def("comm_split_count", &Backend::splitCount)
      .def("_comm_ptr", &Backend::commPtr, NoGil())
      .def_property_readonly("comm_ptr", py::cpp_function(&Backend::commPtr, NoGil()))
      .def_property_readonly("uid", &Backend::uid)
      .def("_is_initialized", &Backend::isInitialized, NoGil())
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"))
      .def("perform_nocolor_split", [](Backend&, const at::Device&) {}, py::arg("device"));
  backend.attr("NCCL_CTA_POLICY_DEFAULT") = NCCL_CTA_POLICY_DEFAULT;
  backend.attr("NCCL_CTA_POLICY_EFFICIENCY") = NCCL_CTA_POLICY_EFFICIENCY;
  backend.attr("NCCL_CTA_POLICY_ZERO") = NCCL_CTA_POLICY_ZERO;
  bindMemory(module);
}
