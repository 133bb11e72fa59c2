// Tasks of the extension's threads, which the interpreter's exit waits for.
//
// Dropping a tensor that Python references takes the GIL. A thread that requests the GIL during the
// interpreter's exit is terminated by Python; if it is in a destructor then, that ends the process
// (std::terminate). So the interpreter must not exit while a thread of the extension may hold a
// tensor or call a hook. Nor may it exit during a dump of the recorder, which uses static objects
// of libtorch: they are destroyed next.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

namespace torchcomms_pg {

// One task, from its hand-over to a thread until that thread has run it and dropped all objects it
// held. Declare it as a member before the objects that the task holds, so that it is destroyed
// after them.
//
// A forked child has none of the threads, and so starts with no task.
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

  // Begins a task that may be requested at any time, such as a dump or a hook. Returns nullopt
  // after close().
  static std::optional<ExitGuard> begin() noexcept {
    std::optional<ExitGuard> begun(std::in_place);
    if ((count_.load(std::memory_order_seq_cst) & kClosed) != 0) {
      begun.reset();
    }
    return begun;
  }

  // Makes begin() return nullopt from now on. Call awaitNone() afterwards for the tasks that have
  // begun.
  static void close() noexcept { count_.fetch_or(kClosed, std::memory_order_seq_cst); }

  // Waits until no task is left. Returns false if `patience` passes first.
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
