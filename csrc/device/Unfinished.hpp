// What threads of the extension still have to do, for the end of the interpreter.
//
// Tensors that Python knows take the GIL when C++ drops them. A thread that
// asks for the GIL once the interpreter ends is ended by it, in the middle of a
// destructor, and that ends the process (std::terminate). So the interpreter
// must not end while a thread of ours may hold a tensor or call a hook.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace torchcomms_pg {

// One thing to do, from the moment it is handed to a thread until that thread
// has done it and dropped all it held: a member that is declared before, and
// so destroyed after, what it stands for.
class Unfinished {
 public:
  Unfinished() noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  Unfinished(const Unfinished&) noexcept : Unfinished() {}
  Unfinished& operator=(const Unfinished&) noexcept { return *this; }
  ~Unfinished() { count_.fetch_sub(1, std::memory_order_release); }

  // Whether nothing is left to do, after at most `patience`.
  static bool awaitNone(std::chrono::milliseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (count_.load(std::memory_order_acquire) > 0) {
      if (std::chrono::steady_clock::now() >= until) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  static inline std::atomic<int64_t> count_{0};
};

}  // namespace torchcomms_pg
