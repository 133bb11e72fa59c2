// Python's answers about where two ranks took different ways (torchcomms_pg/parting).
#include "diagnosis/hang/PartingQuestion.hpp"

#include <pybind11/stl.h>

#include <bit>
#include <string>
#include <thread>
#include <utility>

#include "base/NeverDestroyed.hpp"
#include "bindings/Bindings.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

// Returns a thread's number as Python's threading.get_ident() does.
uint64_t numberOf(std::thread::id thread) {
  static_assert(sizeof thread == sizeof(pthread_t));
  return std::bit_cast<pthread_t>(thread);
}

py::list recentOperations(const std::string& group, int64_t rank) {
  py::list told;
  const auto recorder = process_recorder::get();
  if (!recorder) {
    return told;
  }
  const void* before = nullptr;
  py::list calls;
  for (const auto& op : recorder->recent(group, rank)) {
    if (op.stack.get() != before) {
      calls = callsOfStack(op.stack);
      before = op.stack.get();
    }
    told.append(py::make_tuple(op.number, op.op, numberOf(op.thread), calls, op.created));
  }
  return told;
}

}  // namespace

void bindParting(py::module_& module) {
  module.def("recent_operations", &recentOperations, py::arg("group"), py::arg("rank"));
  module.def(
      "set_parting_source",
      [](py::function answer) {
        // Never destroyed: the function is needed until the interpreter ends.
        auto& function = neverDestroyed<py::function>(std::move(answer));
        PartingQuestion::setSource([&function](const PartingQuestion::Asked& asked) {
          if (Py_IsInitialized() == 0) {
            return std::string();
          }
          py::gil_scoped_acquire gil;
          try {
            return function(asked.step, asked.group, asked.number, asked.rank, asked.texts)
                .cast<std::string>();
          } catch (const py::error_already_set&) {
            return std::string();  // the verdict then says nothing of it
          }
        });
      },
      py::arg("answer"));
}

}  // namespace torchcomms_pg
