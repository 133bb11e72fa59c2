// Time for which this process has certainly run.
#pragma once

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>

namespace torchcomms_pg {

// Counts the time between calls of at(). A longer gap counts as `gap`, since the process may have
// been stopped, or got no core. For one thread at a time.
class RunningTime {
 public:
  using Clock = std::chrono::steady_clock;

  explicit RunningTime(Clock::duration gap) : gap_(gap) {}

  // Returns the time counted until `now`.
  Clock::duration at(Clock::time_point now) {
    ran_ += std::clamp<Clock::duration>(now - last_.value_or(now), Clock::duration(0), gap_);
    last_ = std::max(last_.value_or(now), now);
    return ran_;
  }
  // Returns the time counted until the last call of at().
  Clock::duration ran() const { return ran_; }

 private:
  Clock::duration gap_;
  std::optional<Clock::time_point> last_;
  Clock::duration ran_{};
};

// Waits for the future for at most `patience`, in which this process runs. Returns whether the
// future is ready.
inline bool waitRunning(const auto& future, RunningTime::Clock::duration patience) {
  const auto slice = patience / 32;
  RunningTime time(2 * slice);
  while (future.wait_for(slice) != std::future_status::ready) {
    if (time.at(RunningTime::Clock::now()) >= patience) {
      return false;
    }
  }
  return true;
}

}  // namespace torchcomms_pg
