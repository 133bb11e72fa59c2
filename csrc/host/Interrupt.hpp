// Interrupts of waits: a signal handler that raises makes a thread leave the call that waits.
#pragma once

#include <atomic>
#include <exception>
#include <string>

#include "host/NcclError.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg::host {

// Source of interrupts. A thread that waits in a call polls pending() a few times a second, while
// it holds no lock.
struct InterruptSource {
  // Returns whether signal handlers run in the calling thread.
  bool (*here)() noexcept;
  // Returns whether the calling thread must leave its call. Stays true until take().
  bool (*pending)() noexcept;
  // Returns the exception that the call must then raise, or null if the call must not raise.
  std::exception_ptr (*take)() noexcept;
};

inline std::atomic<const InterruptSource*> interruptSource{nullptr};

inline bool runsHandlers() noexcept {
  const auto* const source = interruptSource.load(std::memory_order_acquire);
  return source != nullptr && source->here();
}

inline bool interrupted() noexcept {
  const auto* const source = interruptSource.load(std::memory_order_acquire);
  return source != nullptr && source->pending();
}

inline std::exception_ptr takeInterrupt() noexcept {
  const auto* const source = interruptSource.load(std::memory_order_acquire);
  return source == nullptr ? nullptr : source->take();
}

// Returns the failure that the other ranks get if an interrupt makes `rank`, a rank of this
// process, leave a call.
inline NcclError interruption(int rank) {
  return NcclError(
      ncclRemoteError,
      "rank " + std::to_string(rank) + " (pid " + std::to_string(processId()) +
          ") was interrupted by a signal",
      {rank});
}

}  // namespace torchcomms_pg::host
