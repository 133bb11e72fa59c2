// A limit of waits that most likely are in vain for one reason.
#pragma once

#include <atomic>
#include <chrono>

namespace torchcomms_pg {

// Time that a process gives waits at the ends of its groups: a peer that is stopped, or a store
// whose host is gone, holds up all of them, one after another. After a wait in vain the next ones
// get little time. Thread-safe.
class SharedPatience {
 public:
  // Limit in place of the full one where more would most likely be in vain.
  static constexpr std::chrono::milliseconds kBrief{200};

  constexpr explicit SharedPatience(std::chrono::milliseconds full) : full_(full) {}

  // Calls `wait` with a time limit, and returns its result: whether what it waits for has come.
  template <class Wait>
  bool spend(const Wait& wait) {
    const bool came = wait(Clock::now() < briefUntil_.load() ? kBrief : full_);
    if (!came) {
      briefUntil_ = Clock::now() + full_;
    }
    return came;
  }

 private:
  using Clock = std::chrono::steady_clock;

  const std::chrono::milliseconds full_;
  std::atomic<Clock::time_point> briefUntil_{};
};

}  // namespace torchcomms_pg
