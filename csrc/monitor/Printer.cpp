#include "monitor/Printer.hpp"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

constexpr size_t kMostBytes = size_t{1} << 20;

// Writes to stderr. If `wait`, blocks until all of the text is written. Otherwise stops when stderr
// accepts no more; writes parts of at most PIPE_BUF bytes, which a pipe accepts as a whole or not
// at all (pipe(7)).
void writeToStderr(std::string_view text, bool wait) {
  pollfd place{STDERR_FILENO, POLLOUT, 0};
  while (!text.empty()) {
    if (!wait && poll(&place, 1, 0) == 0) {
      return;
    }
    const auto part = wait ? text : text.substr(0, PIPE_BUF);
    const auto written = write(STDERR_FILENO, part.data(), part.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN && wait) {
      poll(&place, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

class Printer {
 public:
  static Printer& get() {
    static PerProcess<Printer> printer;
    return printer.get();
  }

  void add(std::string line) {
    LockGuard lock(mutex_);
    if (bytes_ + line.size() > kMostBytes) {
      ++lost_;
      return;
    }
    if (lost_ > 0) {
      line = "torchcomms_pg: " + std::to_string(std::exchange(lost_, 0)) +
             " lines are lost: nobody reads stderr\n" + line;
    }
    if (!running_) {
      try {
        startDetached("tcpg_print", [this] { run(); });
      } catch (const std::system_error&) {
        // No thread can be started.
        writeToStderr(line, /*wait=*/false);
        return;
      }
      running_ = true;
    }
    bytes_ += line.size();
    lines_.push_back(std::move(line));
  }

  bool awaitNone(std::chrono::milliseconds patience) {
    UniqueLock lock(mutex_);
    return ended_.wait_for(lock, patience, [&]() REQUIRES(mutex_) { return !running_; });
  }

 private:
  void run() {
    UniqueLock lock(mutex_);
    for (; !lines_.empty(); lines_.pop_front()) {
      const auto& line = lines_.front();  // other threads only append
      lock.unlock();
      writeToStderr(line, /*wait=*/true);
      lock.lock();
      bytes_ -= line.size();
    }
    running_ = false;
    ended_.notify_all();
  }

  Mutex mutex_;
  std::condition_variable ended_;
  std::deque<std::string> lines_ GUARDED_BY(mutex_);
  size_t bytes_ GUARDED_BY(mutex_) = 0;
  uint64_t lost_ GUARDED_BY(mutex_) = 0;
  bool running_ GUARDED_BY(mutex_) = false;
};

}  // namespace

void printLine(const std::string& line) {
  Printer::get().add(line + "\n");
}

void printError(const std::exception& error) noexcept {
  attempt([&] { printLine(std::string("torchcomms_pg: ") + error.what()); });
}

bool awaitPrinted(std::chrono::milliseconds patience) {
  return Printer::get().awaitNone(patience);
}

}  // namespace torchcomms_pg
