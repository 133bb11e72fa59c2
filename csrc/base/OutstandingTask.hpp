// Tasks that threads of the extension have not finished, for the end of the interpreter.
//
// Tensors that Python knows take the GIL when C++ drops them. A thread that asks for the GIL once
// the interpreter ends is ended by it, in the middle of a destructor, and that ends the process
// (std::terminate). So the interpreter must not end while a thread of ours may hold a tensor or
// call a hook; and when it has, libtorch's static objects go, which a dump of the recorder uses.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

namespace torchcomms_pg {

// One task, from the moment it is handed to a thread until that thread has done it and dropped all
// it held. Make it a member that is declared before, and so destroyed after, what the task holds.
//
// A forked child has none of the threads, and so begins with no task.
class OutstandingTask {
 public:
  OutstandingTask() noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  OutstandingTask(const OutstandingTask&) noexcept : OutstandingTask() {}
  OutstandingTask& operator=(const OutstandingTask&) noexcept { return *this; }
  ~OutstandingTask() {
    if (process_ == processes_) {
      count_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Begins a task that other processes ask for at any time, such as a dump, or a hook. None once
  // the interpreter ends.
  static std::optional<OutstandingTask> begin() noexcept {
    std::optional<OutstandingTask> begun(std::in_place);
    if ((count_.load(std::memory_order_seq_cst) & kClosed) != 0) {
      begun.reset();
    }
    return begun;
  }

  // Ends begin() from here on. Tasks that have begun may be waited for afterwards.
  static void close() noexcept { count_.fetch_or(kClosed, std::memory_order_seq_cst); }

  // Waits until no task is left. False: `patience` has passed first.
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
