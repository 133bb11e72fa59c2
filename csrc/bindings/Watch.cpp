// The watch over groups of other backends, for torchcomms_pg/diagnosis/watching.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/Bindings.hpp"
#include "diagnosis/watch/WaitedWork.hpp"
#include "diagnosis/watch/Watch.hpp"

namespace torchcomms_pg {

namespace {

// A watch's handle in Python. The watch itself lives as long as its group.
struct WatchHandle {
  std::weak_ptr<Watch> watch;
};

// Puts WaitedWork around wait() of `works`, torch's class of Works. Not a function of Python: a
// traceback has no frame more, and a compiler of Python sees a function of C++ as before.
void observeWaits(const py::object& works) {
  const py::object wait = works.attr("wait");
  works.attr("wait") = py::cpp_function(
      [wait](const py::object& work, const py::args& args, const py::kwargs& options) {
        const WaitedWork waited(work.cast<c10d::Work*>());
        return wait(work, *args, **options);
      },
      py::name("wait"), py::is_method(works));
}

}  // namespace

void bindWatch(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.attr("groups_have_hooks") = kGroupsHaveHooks;
  py::class_<WatchHandle>(module, "Watch")
      .def(
          "set_timeout",
          [](const WatchHandle& self, Milliseconds timeout) {
            if (const auto watch = self.watch.lock()) {
              watch->setTimeout(timeout);
            }
          },
          py::arg("timeout"), NoGil())
      .def(
          "lateness",
          [](const WatchHandle& self, const char* operation) {
            const auto watch = self.watch.lock();
            if (!watch) {
              throw std::runtime_error(std::string(operation) + ": the group has ended");
            }
            return watch->lateness(operation);
          },
          py::arg("operation"), NoGil())
      .def(
          "close",
          [](const WatchHandle& self) {
            if (const auto watch = self.watch.lock()) {
              watch->close();
            }
          },
          NoGil());
  module.def(
      "observe_waits",
      [](const py::object& works) {
        static bool observed = false;
        if (!std::exchange(observed, true)) {
          observeWaits(works);
        }
      },
      py::arg("works"));
  module.def(
      "watch",
      [](c10d::ProcessGroup& group, const std::vector<int64_t>& ranks,
         const std::vector<std::string>& devices, Milliseconds timeout) {
        std::vector<c10::DeviceType> types;
        for (const auto& device : devices) {
          types.push_back(c10::Device(device).type());
        }
        return WatchHandle{Watch::begin(group, ranks, types, timeout)};
      },
      py::kw_only(), py::arg("group"), py::arg("ranks"), py::arg("devices"), py::arg("timeout"),
      NoGil());
}

}  // namespace torchcomms_pg
