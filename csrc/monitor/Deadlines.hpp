// The deadlines of a group's operations.
#pragma once

#include <chrono>

namespace torchcomms_pg {

// Tells when an operation is overdue, unless a verdict has extended its deadline. For one thread.
class Deadlines {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns whether an operation that was issued at `issued`, and began at `begun`, has taken
  // longer than `timeout`.
  bool passed(
      Clock::time_point issued, Clock::time_point begun, Clock::duration timeout,
      Clock::time_point now) const {
    const bool extended = now < extendedUntil_ && issued <= extendedAt_;
    return now - begun >= timeout && !extended;
  }

  // Extends the deadlines of the operations issued by `now`. Returns false if an earlier extension
  // still lasts.
  bool extend(Clock::duration time, Clock::time_point now) {
    const bool first = now >= extendedUntil_;
    extendedAt_ = now;
    extendedUntil_ = now + time;
    return first;
  }

 private:
  Clock::time_point extendedAt_{};
  Clock::time_point extendedUntil_{};
};

}  // namespace torchcomms_pg
