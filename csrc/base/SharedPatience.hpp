// A time limit shared by waits that are likely to fail for the same reason.
#pragma once

#include <atomic>
#include <chrono>

namespace torchcomms_pg {

// Time limit for waits when groups end. One stopped peer, or one store whose host is gone, delays
// the end of each group in turn; so after a wait that times out, the next waits get kBrief only.
// Thread-safe.
class SharedPatience {
 public:
  // Limit after a recent timeout, when the next wait is likely to time out too.
  static constexpr std::chrono::milliseconds kBrief{200};

  constexpr explicit SharedPatience(std::chrono::milliseconds full) : full_(full) {}

  // Calls `wait` with a time limit. `wait` returns false if it timed out; so does spend().
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
