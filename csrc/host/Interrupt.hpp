// Tells a thread that waits here that the handler of a signal wants it elsewhere.
#pragma once

#include <atomic>
#include <exception>
#include <string>

#include "host/NcclError.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg::host {

// Source of interrupts. A thread that waits in a call asks it a few times a second, with no lock
// held.
struct InterruptSource {
  // Returns whether handlers run in the calling thread.
  bool (*here)() noexcept;
  // Returns whether the calling thread is to leave its call. Stays true until take().
  bool (*pending)() noexcept;
  // Returns the exception that the call is to raise then; null: none.
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

// Returns the failure that the other ranks are told when `rank`, this process's, has left a call
// so.
inline NcclError interruption(int rank) {
  return NcclError(
      ncclRemoteError,
      "rank " + std::to_string(rank) + " (pid " + std::to_string(processId()) +
          ") was interrupted by a signal",
      {rank});
}

}  // namespace torchcomms_pg::host
