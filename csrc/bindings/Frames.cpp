// What other threads' frames tell Python code of this project, which never gets the frames: what
// reads a frame of a thread that runs on would be wrong, or in Python 3.11 crash.
#include "bindings/Frames.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace torchcomms_pg {

namespace {

// Returns what sys.`name`() returns. It allocates while it holds the lock of the list of threads.
// In Python 3.11 a thread that needs the lock would wait for it with the GIL, for ever, if the
// collector ran and let go of the GIL (github.com/python/cpython/issues/106883).
py::dict ofAllThreads(const char* name, const WithoutCollector& /*needed*/) {
  return py::module_::import("sys").attr(name)();
}

PyFrameObject* newReference(py::handle frame) {
  return reinterpret_cast<PyFrameObject*>(frame.inc_ref().ptr());
}

py::object codeOf(PyFrameObject* frame) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
}

py::dict threadStacks() {
  const WithoutCollector guard;
  py::dict stacks;
  for (const auto& [thread, innermost] : ofAllThreads("_current_frames", guard)) {
    py::list stack;
    walk(newReference(innermost), [&](PyFrameObject* frame) {
      stack.append(
          py::make_tuple(codeOf(frame), instructionOf(frame), PyFrame_GetLineNumber(frame)));
      return true;
    });
    stacks[thread] = std::move(stack);
  }
  return stacks;
}

bool isFunction(const py::object& code) {
  return (reinterpret_cast<PyCodeObject*>(code.ptr())->co_flags & CO_OPTIMIZED) != 0;
}

// Returns whether reading a frame of this code changes what the code sees. Before Python 3.13 the
// frame of a function has one dictionary of its variables, which is brought up to date whenever
// they are read, and which the function gets from locals(), say.
bool seesReading([[maybe_unused]] const py::object& code) {
#if PY_VERSION_HEX < 0x030d0000
  for (const auto& name : code.attr("co_names")) {
    const auto text = name.cast<std::string_view>();
    if (text == "locals" || text == "vars" || text == "exec" || text == "eval") {
      return isFunction(code);
    }
  }
#endif
  return false;
}

// Returns a frame's global and local variables.
py::dict namesOf(PyFrameObject* frame, const py::object& code) {
  const auto globals = py::reinterpret_steal<py::object>(PyFrame_GetGlobals(frame));
  const auto given = py::reinterpret_steal<py::object>(PyFrame_GetLocals(frame));
  py::dict names;
  if (!given || PyDict_Update(names.ptr(), globals.ptr()) != 0 ||
      PyDict_Update(names.ptr(), given.ptr()) != 0) {
    throw py::error_already_set();
  }
  // Before Python 3.13 the frame keeps the dictionary, and with it what the function deletes later.
  // One that only the frame and this function have is emptied.
  if (PyDict_CheckExact(given.ptr()) && isFunction(code) && Py_REFCNT(given.ptr()) == 2) {
    PyDict_Clear(given.ptr());
  }
  return names;
}

std::optional<py::dict> variablesOf(uint64_t thread, size_t level, const py::object& code) {
  const WithoutCollector guard;
  const auto frames = ofAllThreads("_current_frames", guard);
  const auto number = py::int_(thread);
  if (!frames.contains(number)) {
    return std::nullopt;
  }
  std::vector<py::object> stack;
  walk(newReference(frames[number]), [&](PyFrameObject* frame) {
    stack.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame)));
    return true;
  });
  if (level >= stack.size()) {
    return std::nullopt;
  }
  auto* const frame = reinterpret_cast<PyFrameObject*>(stack[stack.size() - 1 - level].ptr());
  if (!codeOf(frame).is(code) || seesReading(code)) {
    return std::nullopt;
  }
  return namesOf(frame, code);
}

}  // namespace

void bindFrames(py::module_& module) {
  module.def("thread_stacks", &threadStacks);
  module.def("variables_of", &variablesOf, py::arg("thread"), py::arg("level"), py::arg("code"));
  module.def("current_exceptions", [] {
    const WithoutCollector guard;
    return ofAllThreads("_current_exceptions", guard);
  });
}

}  // namespace torchcomms_pg
