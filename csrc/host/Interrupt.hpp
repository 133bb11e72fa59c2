// How whoever waits here finds out that its thread is wanted elsewhere: by the handler of a signal.
#pragma once

#include <atomic>
#include <exception>
#include <string>

#include "host/Failure.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg::host {

// Asked a few times a second by a thread that waits in a call, with no lock held.
struct InterruptSource {
  // Whether handlers run in the calling thread.
  bool (*here)() noexcept;
  // Whether the calling thread is to leave its call. It stays true until take().
  bool (*pending)() noexcept;
  // What the call is to raise then; null: nothing.
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

// What the other ranks are told of `rank`, this process's, when it has left a call so.
inline Failure interruption(int rank) {
  return Failure(
      ncclRemoteError,
      "rank " + std::to_string(rank) + " (pid " + std::to_string(processId()) +
          ") was interrupted by a signal",
      {rank});
}

}  // namespace torchcomms_pg::host
