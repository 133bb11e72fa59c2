#include "recorder/ProcessRecorder.hpp"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/FileDescriptor.hpp"
#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

struct Instance {
  std::shared_ptr<FlightRecorder> recorder;
  DumpOptions options;
  bool configured = false;
};

struct Shared {
  Mutex mutex;
  Instance instance GUARDED_BY(mutex);
  Mutex writing;
};
// Returns the state. Never destroyed: entries hold Python's frames, and the interpreter may end
// first. A forked child has its own groups, and so its own record.
Shared& shared() {
  static PerProcess<Shared> state;
  return state.get();
}

Instance current() {
  auto& state = shared();
  LockGuard lock(state.mutex);
  return state.instance;
}

[[noreturn]] void failToWrite(const std::string& path, const std::string& why) {
  throw std::runtime_error("flight recorder: cannot write " + path + ": " + why);
}

std::string pickleInTime(
    const std::shared_ptr<FlightRecorder>& recorder, FlightRecorder::What what,
    std::chrono::milliseconds patience) {
  if (what.stacks) {
    // Another thread may hold the GIL forever, so this thread must not wait for the GIL.
    std::packaged_task<std::string()> task([recorder, what] { return recorder->pickle(what); });
    auto pickle = task.get_future();
    try {
      startDetached("tcpg_dump", [unfinished = ExitGuard(), task = std::move(task)]() mutable {
        std::exchange(task, {})();
      });
      if (pickle.wait_for(patience) == std::future_status::ready) {
        return pickle.get();
      }
    } catch (const std::system_error&) {
      // No thread can be started: writes the dump without stacks.
    }
    what.stacks = false;
  }
  return recorder->pickle(what);
}

}  // namespace

void writeDump(const std::string& path, const std::string& content) {
  namespace fs = std::filesystem;
  static std::atomic<uint64_t> count{0};
  const fs::path target(path);
  std::error_code error;
  if (target.has_parent_path()) {
    fs::create_directories(target.parent_path(), error);
  }
  fs::path partial;
  FileDescriptor file;
  do {  // a process in another container may have the same pid
    partial = target.parent_path() /
              (".flight-" + std::to_string(getpid()) + "-" + std::to_string(++count));
    file = FileDescriptor(open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  } while (!file && errno == EEXIST);
  if (!file) {
    failToWrite(path, std::strerror(errno));
  }
  const char* next = content.data();
  auto left = content.size();
  while (left > 0) {
    const auto written = write(file.get(), next, left);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0) {
      const std::string why = std::strerror(errno);
      fs::remove(partial, error);
      failToWrite(path, why);
    }
    next += written;
    left -= written;
  }
  file = FileDescriptor();
  fs::rename(partial, target, error);
  if (error) {
    const auto why = error.message();
    fs::remove(partial, error);
    failToWrite(path, why);
  }
}

namespace process_recorder {

void configure(size_t maxEntries, bool cppStacks, DumpOptions options) {
  auto& state = shared();
  LockGuard lock(state.mutex);
  auto& instance = state.instance;
  instance.options = std::move(options);
  if (!std::exchange(instance.configured, true)) {
    instance.recorder =
        maxEntries > 0 ? std::make_shared<FlightRecorder>(maxEntries, cppStacks) : nullptr;
  }
}

std::shared_ptr<FlightRecorder> get() {
  return current().recorder;
}

std::string dump(int rank, std::chrono::milliseconds most) {
  const auto [recorder, options, configured] = current();
  if (!recorder) {
    return "";
  }
  const auto path = options.prefix + std::to_string(recorder->rank() < 0 ? rank : recorder->rank());
  // One dump at a time, so that an older dump does not replace a newer one. A second caller waits
  // for the first, whose stacks have a time limit.
  LockGuard lock(shared().writing);
  writeDump(path, pickleInTime(recorder, options.what, std::min(options.patience, most)));
  return path;
}

void dumpAfterFailure(int rank, std::chrono::milliseconds most) noexcept {
  try {
    if (current().options.onFailure) {
      dump(rank, most);
    }
  } catch (const std::exception& error) {
    printError(error);
  }
}

std::string pipePrefix() {
  const auto instance = current();
  return instance.recorder ? instance.options.pipe : "";
}

}  // namespace process_recorder

}  // namespace torchcomms_pg
