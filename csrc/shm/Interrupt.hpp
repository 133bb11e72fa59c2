// How whoever waits here finds out that its thread is wanted elsewhere: by the handler of a signal.
#pragma once

#include <atomic>
#include <exception>

namespace torchcomms_pg::shm {

// Asked a few times a second by a thread that waits in a call, with no lock held.
struct InterruptSource {
  // Whether the calling thread is to leave its call. It stays true until take().
  bool (*pending)() noexcept;
  // What the call is to raise then; null: nothing.
  std::exception_ptr (*take)() noexcept;
};

inline std::atomic<const InterruptSource*> interruptSource{nullptr};

inline bool interrupted() noexcept {
  const auto* const source = interruptSource.load(std::memory_order_acquire);
  return source != nullptr && source->pending();
}

inline std::exception_ptr takeInterrupt() noexcept {
  const auto* const source = interruptSource.load(std::memory_order_acquire);
  return source == nullptr ? nullptr : source->take();
}

}  // namespace torchcomms_pg::shm
