// Facts about this process for other ranks: where Python's threads are
// (torchcomms_pg/python_stacks.py), and whether it compiles (compile_watch.py).
#include "monitor/PythonStackDump.hpp"
#include "base/Leaked.hpp"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/Bindings.hpp"
#include "comm/DiagnosisClient.hpp"
#include "monitor/Compiling.hpp"
#include "monitor/Heartbeat.hpp"
#include "recorder/Stack.hpp"

// Function that faulthandler's own watchdog calls without the GIL. Not part of Python's stable API:
// null where this Python lacks it.
extern "C" __attribute__((weak)) const char* _Py_DumpTracebackThreads(
    int file, PyInterpreterState* interpreter, PyThreadState* thread);

namespace torchcomms_pg {

namespace {

using Frames = std::vector<std::tuple<std::string, int64_t, std::string>>;

Frames framesOf(const Stack& stack) {
  Frames frames;
  if (stack != nullptr && StackSource::get() != nullptr) {
    const auto described = StackSource::get()->describe({stack});
    for (const auto& frame : described.front()) {
      frames.emplace_back(frame.file, frame.line, frame.name);
    }
  }
  return frames;
}

// A line for each thread that has frames, with the innermost three, out of
//   Thread 0x00007f4c561b16c0 (most recent call first):
//     File "train.py", line 150 in step
std::string innermost(const std::string& dump) {
  constexpr int kFrames = 3;
  std::string lines;
  std::istringstream in(dump);
  int frames = 0;
  for (std::string line; std::getline(in, line);) {
    const auto file = line.find("File \"");
    const auto behind = line.find("\", line ");
    if (file == std::string::npos || behind == std::string::npos) {
      frames = 0;
    } else if (frames < kFrames) {
      lines += frames > 0 ? " <- " : lines.empty() ? "" : "\n";
      lines += line.substr(file + 6, behind - file - 6) + ":" + line.substr(behind + 8);
      ++frames;
    }
  }
  return lines;
}

// Reads the stacks without the GIL. While one thread keeps the GIL no other changes its stack; that
// one itself is in native code, as long as it does not give it up.
std::string readWithoutGil() {
  if (_Py_DumpTracebackThreads == nullptr || Py_IsInitialized() == 0) {
    return "";
  }
  const int file = memfd_create("stacks", MFD_CLOEXEC);
  if (file < 0) {
    return "";
  }
  _Py_DumpTracebackThreads(file, nullptr, nullptr);
  std::string text(16384, '\0');
  const auto size = pread(file, text.data(), text.size(), 0);
  close(file);
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return innermost(text);
}

}  // namespace

void bindPythonStackDump(py::module_& module) {
  module.def(
      "set_python_stack_source",
      [](py::function describe) {
        // The function is needed until the interpreter ends.
        auto& function = leaked<py::function>(std::move(describe));
        PythonStackDump::Source source;
        source.ask = [&function](const Stack& stack) -> PythonStackDump::Told {
          if (Py_IsInitialized() == 0) {
            return {"Python has ended", ""};
          }
          py::gil_scoped_acquire gil;
          try {
            auto [threads, calledAt] =
                function(framesOf(stack)).cast<std::tuple<std::string, std::string>>();
            return {std::move(threads), std::move(calledAt)};
          } catch (const py::error_already_set& error) {
            return {std::string("Python could not tell its stacks: ") + error.what(), ""};
          }
        };
        source.askWithoutGil = readWithoutGil;
        PythonStackDump::setSource(std::move(source));
      },
      py::arg("describe"));

  module.def("compile_began", &Compiling::begin, py::arg("trigger"));
  module.def("compile_ended", &Compiling::end);
  module.def(
      "watch_over_monitor",
      [](Milliseconds patience, bool endsProcess) { watchOverMonitor({patience, endsProcess}); },
      py::arg("patience"),
      py::arg("ends_process"));
  module.def("set_compile_limit", &Compiling::setLimit, py::arg("limit"));

  py::class_<Comm> comm(module.attr("Communicator"));
  comm.def(
      "relax",
      [](Comm& self, Milliseconds time) {
        return self->diagnosis().relax(time).time_since_epoch().count();
      },
      py::arg("time"));
  comm.def(
      "end_relaxation",
      [](Comm& self, Clock::rep end) {
        self->diagnosis().endRelaxation(Clock::time_point(Clock::duration(end)));
      },
      py::arg("end"));
}

}  // namespace torchcomms_pg
