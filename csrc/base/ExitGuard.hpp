// Tasks of the extension's threads. The interpreter's exit waits for these tasks.
//
// Dropping a tensor that Python references takes the GIL. Python terminates a thread that requests
// the GIL during the interpreter's exit. In a destructor, that termination ends the process
// (std::terminate). So the interpreter must not exit while a thread of the extension may hold a
// tensor or call a hook. Nor may the interpreter exit during a dump of the recorder: the dump uses
// static objects of libtorch, which are destroyed next.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

namespace torchcomms_pg {

// Counts one task, from its hand-over to a thread until the thread has run the task and dropped all
// objects of the task. Declare the guard as a member before the task's objects, so that it is
// destroyed after them.
//
// A forked child has none of its parent's threads, so its count starts at 0.
class ExitGuard {
 public:
  ExitGuard() noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  ExitGuard(const ExitGuard&) noexcept : ExitGuard() {}
  ExitGuard& operator=(const ExitGuard&) noexcept { return *this; }
  ~ExitGuard() {
    if (process_ == processes_) {
      count_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Returns a guard for a task that may be requested at any time, such as a dump or a hook, or
  // nullopt after close(): the task must not run then.
  static std::optional<ExitGuard> begin() noexcept {
    std::optional<ExitGuard> begun(std::in_place);
    if ((count_.load(std::memory_order_seq_cst) & kClosed) != 0) {
      begun.reset();
    }
    return begun;
  }

  // Makes begin() return nullopt from now on. Call awaitNone() next, for tasks that have begun.
  static void close() noexcept { count_.fetch_or(kClosed, std::memory_order_seq_cst); }

  // Waits until no task is left. Returns false if one is left after `patience`.
  static bool awaitNone(std::chrono::milliseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while ((count_.load(std::memory_order_acquire) & ~kClosed) > 0) {
      if (std::chrono::steady_clock::now() >= until) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  static constexpr int64_t kClosed = int64_t{1} << 62;
  static inline std::atomic<int64_t> count_{0};
  static inline uint32_t processes_ = 0;  // number of forks that led to this process
  static inline const int forks_ = pthread_atfork(nullptr, nullptr, [] {
    ++processes_;
    count_.store(0, std::memory_order_relaxed);
  });

  const uint32_t process_ = processes_;
};

}  // namespace torchcomms_pg
