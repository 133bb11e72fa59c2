// A time limit shared by waits that are likely to fail for the same reason.
#pragma once

#include <atomic>
#include <chrono>

namespace torchcomms_pg {

// Time limit for waits after a failure or at the end of groups. One stopped peer, or one store
// whose host is gone, would delay each group in turn. So for a time of `full` after a wait has
// timed out, waits get only kBrief. Thread-safe.
class SharedPatience {
 public:
  // Limit of a wait that begins soon after a timeout, and so is likely to time out too.
  static constexpr std::chrono::milliseconds kBrief{200};

  constexpr explicit SharedPatience(std::chrono::milliseconds full) : full_(full) {}

  // Calls `wait` with a time limit and returns its result, which is false if it has timed out.
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
