// Facts about this process for other ranks: where Python's threads are
// (torchcomms_pg/diagnosis/python_stacks.py), and whether the process compiles (compile_watch.py).
#include "diagnosis/rank/PythonStackDump.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/TextStreams.hpp"

#include <dlfcn.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/StorePlace.hpp"
#include "bindings/Bindings.hpp"
#include "diagnosis/group/DiagnosisClient.hpp"
#include "diagnosis/group/ErrorFile.hpp"
#include "diagnosis/group/LastWords.hpp"
#include "diagnosis/group/OtherWaits.hpp"
#include "diagnosis/group/ProcessActivity.hpp"
#include "diagnosis/rank/Heartbeat.hpp"
#include "diagnosis/rank/SignalAction.hpp"
#include "diagnosis/store/StoreBoard.hpp"
#include "diagnosis/watch/Watch.hpp"
#include "host/Limits.hpp"
#include "monitor/Compiling.hpp"
#include "monitor/Monitor.hpp"
#include "recorder/ProcessRecorder.hpp"
#include "recorder/Stack.hpp"

// The function that faulthandler's watchdog calls without the GIL. It is not part of Python's
// stable API: null if this Python does not export it, as from 3.13 on.
extern "C" __attribute__((weak)) const char* _Py_DumpTracebackThreads(
    int file, PyInterpreterState* interpreter, PyThreadState* thread);

namespace torchcomms_pg {

namespace {

using Handler = void (*)(int);

// Returns the handler of a signal if it lies in the shared object of Python's functions, otherwise
// null.
Handler inPython(int signal) {
  const auto handler = PyOS_getsig(signal);
  Dl_info python{};
  Dl_info known{};
  const bool found = dladdr(reinterpret_cast<const void*>(&PyOS_getsig), &python) != 0 &&
                     dladdr(reinterpret_cast<const void*>(handler), &known) != 0;
  return found && python.dli_fbase == known.dli_fbase ? handler : nullptr;
}

// Returns the handler that Python installs for every signal that has a handler in Python. SIGINT
// has one, unless a shell has started the program in the background: then SIGINT is ignored, and
// SIGURG, which the system drops by default, gets a handler for a moment. Only the main thread can
// set handlers; returns null if it has not called this function, and SIGINT has no handler in
// Python.
Handler handlerOfPython() {
  static Handler known = nullptr;  // guarded by the GIL
  known = known != nullptr ? known : inPython(SIGINT);
  if (known != nullptr || PyOS_getsig(SIGURG) != SIG_DFL) {
    return known;
  }
  try {
    const auto signals = py::module_::import("signal");
    const auto before = signals.attr("signal")(SIGURG, py::cpp_function([](int, py::object) {}));
    known = inPython(SIGURG);
    signals.attr("signal")(SIGURG, before);
  } catch (const py::error_already_set&) {
    // This is not the main thread.
  }
  return known;
}

// Limit of the time for Python's stacks in the dump of a process that leaves a group.
constexpr Milliseconds kDumping{1000};

void dumpOf(const GroupActivity& group) {
  process_recorder::dumpAfterFailure(static_cast<int>(group.globalRank()), kDumping);
}

using Frames = std::vector<std::tuple<std::string, int64_t, std::string>>;

std::vector<Frames> framesOf(const std::vector<Stack>& stacks) {
  std::vector<Frames> all(stacks.size());
  if (!stacks.empty() && StackSource::get() != nullptr) {
    const auto described = StackSource::get()->describe(stacks);
    for (size_t i = 0; i < stacks.size(); ++i) {
      for (const auto& frame : described[i]) {
        all[i].emplace_back(frame.file, frame.line, frame.name);
      }
    }
  }
  return all;
}

// Returns whether a frame's line is in a file whose functions stand in for torch's.
bool standsIn(const std::string& line) {
  return line.find("/torchcomms_pg/diagnosis/") != std::string::npos ||
         line.find("/torchcomms_pg/_patches.py\"") != std::string::npos;
}

// Returns a line of the three innermost frames for each thread with frames, without those that
// stand in for torch's, from a dump such as
//   Thread 0x00007f4c561b16c0 (most recent call first):
//     File "train.py", line 150 in step
std::vector<std::string> innermost(const std::string& dump) {
  constexpr int kFrames = 3;
  std::vector<std::string> lines;
  TextReader in(dump);
  int frames = 0;
  for (std::string line; std::getline(in, line);) {
    const auto file = line.find("File \"");
    const auto behind = line.find("\", line ");
    if (file == std::string::npos || behind == std::string::npos) {
      frames = 0;
    } else if (frames < kFrames && !standsIn(line)) {
      if (frames++ == 0) {
        lines.emplace_back();
      } else {
        lines.back() += " <- ";
      }
      lines.back() += line.substr(file + 6, behind - file - 6) + ":" + line.substr(behind + 8);
    }
  }
  return lines;
}

// faulthandler's handler of a signal, which this project calls as a function: `dump` writes the
// stacks of all threads to stderr without the GIL. Null if _Py_DumpTracebackThreads exists, or if
// no signal was free. Set before any thread asks for stacks.
struct FaultHandler {
  int signal = 0;
  void (*dump)(int signal) = nullptr;
};
FaultHandler faultHandler;

// Sets `faultHandler`: makes faulthandler register its handler for a signal without a handler, and
// then restores the signal's former action. Needs the GIL.
void borrowFaultHandler() {
  for (int number = SIGRTMAX; number >= SIGRTMIN; --number) {
    struct sigaction before{};
    struct sigaction made{};
    if (sigaction(number, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) {
      continue;
    }
    py::module_::import("faulthandler")
        .attr("register")(number, py::arg("file") = STDERR_FILENO, py::arg("all_threads") = true);
    sigaction(number, &before, &made);
    faultHandler = {number, made.sa_handler};
    return;
  }
}

// Writes the stacks of all threads to `file`, without the GIL. Called in a copy of this process,
// and may replace the copy's stderr.
void dumpStacks(int file) {
  if (_Py_DumpTracebackThreads != nullptr) {
    _Py_DumpTracebackThreads(file, nullptr, nullptr);
  } else {
    dup2(file, STDERR_FILENO);
    faultHandler.dump(faultHandler.signal);
  }
}

// Waits for the end of `copy`, a process made by readInCopy(), and kills it after 500 ms.
void awaitCopy(pid_t copy) {
  constexpr int kPatience = 500;  // ms
  for (int waited = 0; waitpid(copy, nullptr, __WALL | WNOHANG) == 0; ++waited) {
    if (waited == kPatience) {
      kill(copy, SIGKILL);
      waitpid(copy, nullptr, __WALL);
      return;
    }
    usleep(1000);
  }
}

// Reads the stacks in a copy of this process, without the GIL. The copy may be made while a thread
// changes its frames, which can crash the reader; then only the copy crashes.
std::vector<std::string> readInCopy() {
  const int file = memfd_create("stacks", MFD_CLOEXEC);
  if (file < 0) {
    return {};
  }
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signal handlers must not run in the copy
  // Unlike fork(), this call runs no atfork handlers, and the copy's end sends no SIGCHLD.
  const auto process = getpid();
  const auto copy = static_cast<pid_t>(syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr));
  if (copy == 0) {
    // A copy that is stuck would keep connections of a killed process open.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != process) {
      _exit(0);
    }
    prctl(PR_SET_DUMPABLE, 0);  // no core file after a crash
    dumpStacks(file);
    _exit(0);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::string text;
  if (copy > 0) {
    awaitCopy(copy);
    text.resize(16384);
    const auto size = pread(file, text.data(), text.size(), 0);
    text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  }
  close(file);
  return innermost(text);
}

// Returns whether copies of this process might take memory that the process needs: pages that its
// threads write to while a copy exists are there twice. A copy exists for half a second at most,
// and usually for some 10 ms a GB.
bool memoryIsShort() {
  size_t pages = 0;
  size_t resident = 0;
  size_t shared = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident >> shared;
  const auto own = (resident - std::min(resident, shared)) * static_cast<size_t>(getpagesize());
  return host::availableMemory().bytes < own / 8 + (size_t{64} << 20);
}

// Returns the lines in which two successive readings agree: they are about threads that do not run.
// Returns "" if this Python's stacks cannot be read without the GIL.
std::string readWithoutGil() {
  if ((_Py_DumpTracebackThreads == nullptr && faultHandler.dump == nullptr) ||
      Py_IsInitialized() == 0 || memoryIsShort()) {
    return "";
  }
  const auto first = readInCopy();
  std::string lines;
  for (const auto& line : readInCopy()) {
    if (std::ranges::find(first, line) != first.end()) {
      lines += (lines.empty() ? "" : "\n") + line;
    }
  }
  return lines;
}

}  // namespace

void bindPythonStackDump(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  handlerOfPython();  // while the module is imported, usually by the main thread
  module.def(
      "set_python_stack_source",
      [](py::function describe) {
        // Never destroyed: the function is needed until the interpreter ends.
        auto& function = neverDestroyed<py::function>(std::move(describe));
        if (_Py_DumpTracebackThreads == nullptr) {
          borrowFaultHandler();
        }
        PythonStackDump::Source source;
        source.ask = [&function](
                         const PythonStackDump::Stacks& stacks,
                         const std::function<void()>& held) -> PythonStackDump::Told {
          const std::vector<std::string> none(stacks.size());
          if (Py_IsInitialized() == 0) {
            return {"Python has ended", none};
          }
          py::gil_scoped_acquire gil;
          held();
          try {
            auto [threads, calledAt, names] =
                function(framesOf(stacks))
                    .cast<std::tuple<
                        std::string, std::vector<std::string>, std::map<uint64_t, std::string>>>();
            return {std::move(threads), std::move(calledAt), std::move(names)};
          } catch (const py::error_already_set& error) {
            return {std::string("Python could not tell its stacks: ") + error.what(), none};
          }
        };
        source.askWithoutGil = readWithoutGil;
        source.mainThread =
            py::module_::import("threading").attr("main_thread")().attr("ident").cast<uint64_t>();
        PythonStackDump::setSource(std::move(source));
      },
      py::arg("describe"));

  module.def("compile_began", &Compiling::begin, py::arg("trigger"));
  module.def("compile_ended", &Compiling::end);
  module.def(
      "watch_over_monitor",
      [](Milliseconds patience, bool endsProcess) { watchOverMonitor({patience, endsProcess}); },
      py::arg("patience"), py::arg("ends_process"));
  module.def(
      "set_status",
      [](const std::string& folder, std::vector<std::string> gateway,
         std::vector<std::string> environment, const std::string& run) {
        status::StatusServer::setFolder(folder, {std::move(gateway), std::move(environment)});
        setRunId(run);
      },
      py::arg("folder"), py::arg("gateway"), py::arg("environment"), py::arg("run"));
  module.def(
      "set_last_words",
      [](bool on) {
        interpretersHandler = handlerOfPython();
        allowLastWords(on);
      },
      py::arg("on"));
  module.def(
      "begin_wait",
      [](std::string text, std::vector<int64_t> ranks, bool meets, std::string calledAt,
         Milliseconds verdictAfter,
         std::optional<std::tuple<std::string, uint16_t, std::string>> meeting, int64_t self) {
        other_waits::OtherWait wait{
            {std::move(text), std::move(ranks), meets, 0, std::move(calledAt)}, verdictAfter};
        if (meeting) {
          auto& [host, port, key] = *meeting;
          wait.place = MeetingPlace{std::move(host), port, std::move(key)};
          wait.self = self;
        }
        return other_waits::begin(std::move(wait));
      },
      py::kw_only(), py::arg("text"), py::arg("ranks"), py::arg("meets"), py::arg("called_at"),
      py::arg("verdict_after"), py::arg("meeting") = py::none(), py::arg("rank") = -1, NoGil());
  py::class_<StoreBoard>(module, "StoreBoard")
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&>(), py::arg("store"))
      .def("get", &StoreBoard::get, py::arg("key"), NoGil())
      .def("claim", &StoreBoard::claimed, py::arg("key"), py::arg("value"), NoGil())
      .def("add", &StoreBoard::add, py::arg("key"), py::arg("value"), NoGil())
      .def("erase", &StoreBoard::erase, py::arg("key"), NoGil());
  module.def(
      "store_place",
      [](const c10::intrusive_ptr<c10d::Store>& store)
          -> std::optional<std::tuple<std::string, uint16_t, std::string>> {
        const StorePlace place(store);
        const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(place.store.get());
        if (tcp == nullptr) {
          return std::nullopt;
        }
        return std::tuple(tcp->getHost(), tcp->getPort(), place.prefixes);
      },
      py::arg("store"));
  module.def("end_wait", &other_waits::end, py::arg("number"), py::arg("joined") = false, NoGil());
  module.def("set_error_file", &error_file::set, py::arg("path"));
  module.def(
      "leave_word",
      [](const std::string& how, const std::vector<std::string>& names, bool fails) {
        bool dumped = !fails;
        for (const auto& group : enlisted()) {
          if (std::ranges::count(names, group->group().name) == 0 || group->closed()) {
            continue;
          }
          const bool failed = !group->failureMessage().empty();
          if (!failed && !std::exchange(dumped, true)) {  // a failed group has dumped
            dumpOf(*group);
          }
          group->leave(how);
        }
      },
      py::arg("how"), py::arg("names"), py::arg("fails"), NoGil());
  module.def(
      "end_with_error",
      [](const std::string& how) {
        Watch::failCalls();
        bool dumped = false;
        for (const auto& group : enlisted()) {
          // Another rank may be the reason of a failure, after which a group has dumped.
          if (!group->closed() && !group->hasFailed()) {
            if (!std::exchange(dumped, true)) {
              dumpOf(*group);
            }
            group->leave(how);
          }
        }
      },
      py::arg("how"), NoGil());
  module.def("set_verdict_after", &DiagnosisClient::setVerdictAfter, py::arg("time"));
  module.def("set_compile_limit", &Compiling::setLimit, py::arg("limit"));

  py::class_<Comm> comm(module.attr("Communicator"));
  comm.def(
      "relax",
      [](Comm& self, Milliseconds time) {
        return self->relaxations().begin(time).time_since_epoch().count();
      },
      py::arg("time"));
  comm.def(
      "end_relaxation",
      [](Comm& self, Clock::rep end) {
        self->relaxations().end(Clock::time_point(Clock::duration(end)));
      },
      py::arg("end"));
}

}  // namespace torchcomms_pg
