#include "diagnosis/dumps/DumpPipe.hpp"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "base/ExitGuard.hpp"
#include "base/FileDescriptor.hpp"
#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "monitor/Printer.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

struct PipeState {
  Mutex mutex;
  std::weak_ptr<DumpPipe> pipe GUARDED_BY(mutex);
  // The pipe that made the file, or null.
  const DumpPipe* latest GUARDED_BY(mutex) = nullptr;
};
PerProcess<PipeState> pipeState;

// Returns the name of the process that reads the pipe at `path`, or "" if no process does. The
// reader locks the pipe. The lock ends with the process, and a forked child does not inherit the
// lock.
std::string readerOf(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!file) {
    return "";
  }
  struct flock lock{};
  lock.l_type = F_WRLCK;
  const bool locked = fcntl(file.get(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  // fcntl(2): the process is 0 if it is in another PID namespace.
  return !locked           ? ""
         : lock.l_pid == 0 ? "a process of another container"
                           : "process " + std::to_string(lock.l_pid);
}

}  // namespace

// State shared with the pipe's thread, which may outlive the pipe by the time of a dump.
struct DumpPipe::Reader {
  FileDescriptor pipe;
  FileDescriptor end;  // eventfd that ends the thread
  int rank = 0;

  void run() const {
    std::array<pollfd, 2> watched{{{end.get(), POLLIN, 0}, {pipe.get(), POLLIN, 0}}};
    for (;;) {
      const int ready = poll(watched.data(), watched.size(), -1);
      if (ready > 0 && watched[0].revents != 0) {
        return;
      }
      if (ready > 0 && drain()) {
        if (const auto unfinished = ExitGuard::begin()) {
          try {
            process_recorder::dump(rank);
          } catch (const std::exception& error) {
            printError(error);
          }
        }
      }
    }
  }

 private:
  // Reads all that has been written so far, so that several writes cause one dump. Returns whether
  // there was anything to read.
  bool drain() const {
    std::array<char, 512> text{};
    bool any = false;
    while (read(pipe.get(), text.data(), text.size()) > 0) {
      any = true;
    }
    return any;
  }
};

std::shared_ptr<DumpPipe> DumpPipe::hold(int rank) {
  const auto prefix = process_recorder::pipePrefix();
  if (prefix.empty()) {
    return nullptr;
  }
  auto& state = pipeState.get();
  LockGuard lock(state.mutex);
  auto pipe = state.pipe.lock();
  if (!pipe) {
    try {
      pipe = std::make_shared<DumpPipe>(prefix, rank);
    } catch (const std::exception& error) {
      TORCH_WARN(error.what(), "; writing into it will not have this process dump its record");
      return nullptr;
    }
    state.pipe = pipe;
    state.latest = pipe.get();
  }
  return pipe;
}

void DumpPipe::removeAtExit() noexcept {
  auto& state = pipeState.get();
  LockGuard lock(state.mutex);
  if (state.latest != nullptr) {
    unlink(state.latest->path_.c_str());
  }
}

DumpPipe::DumpPipe(const std::string& prefix, int rank)
    : path_(prefix + std::to_string(rank) + ".pipe"),
      pid_(getpid()),
      reader_(std::make_shared<Reader>()) {
  const auto failToMake = [&](const std::string& why) {
    throw std::runtime_error("flight recorder: cannot make the pipe " + path_ + ": " + why);
  };
  // Replaces a pipe that a killed process left, but no other file.
  struct stat there{};
  if (lstat(path_.c_str(), &there) == 0 && !S_ISFIFO(there.st_mode)) {
    failToMake("there is something else at that path");
  }
  if (const auto reader = readerOf(path_); !reader.empty()) {
    failToMake(reader + " reads the one that is there");
  }
  if ((unlink(path_.c_str()) != 0 && errno != ENOENT) || mkfifo(path_.c_str(), 0666) != 0) {
    failToMake(std::strerror(errno));
  }
  // Opens the pipe for writing too, so that a writer that closes it causes no end of file.
  reader_->pipe = FileDescriptor(open(path_.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  reader_->end = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  reader_->rank = rank;
  struct flock lock{};
  lock.l_type = F_WRLCK;
  if (!reader_->pipe || !reader_->end || fcntl(reader_->pipe.get(), F_SETLK, &lock) != 0) {
    const std::string why = std::strerror(errno);
    unlink(path_.c_str());
    failToMake(why);
  }
  try {
    startDetached("tcpg_dump_pipe", [reader = reader_] { reader->run(); });
  } catch (const std::system_error& error) {
    unlink(path_.c_str());
    failToMake(std::string("no thread can be started to read it: ") + error.what());
  }
}

DumpPipe::~DumpPipe() {
  if (pid_ == getpid()) {
    auto& state = pipeState.get();
    LockGuard lock(state.mutex);
    if (state.latest == this) {  // otherwise a later group has made a new pipe
      state.latest = nullptr;
      unlink(path_.c_str());
    }
    const uint64_t one = 1;
    [[maybe_unused]] const auto told = write(reader_->end.get(), &one, sizeof(one));
  }
}

}  // namespace torchcomms_pg
