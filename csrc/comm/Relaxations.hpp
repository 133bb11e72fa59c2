// For how long the peers of a rank are to wait for it past their deadlines.
#pragma once

#include <algorithm>
#include <atomic>
#include <set>

#include "base/Mutex.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

// The relaxations of one communicator. Thread-safe.
class Relaxations {
 public:
  // For the next `time`, makes peers wait for this rank past their deadlines, and lets operations
  // issued on this rank take that long. Returns the time at which this relaxation ends; end() with
  // that time ends it earlier.
  Clock::time_point begin(Milliseconds time) {
    LockGuard lock(mutex_);
    const auto end = *ends_.insert(Clock::now() + time);
    noteLast();
    return end;
  }
  void end(Clock::time_point end) {
    LockGuard lock(mutex_);
    ends_.extract(end);  // one of the relaxations that end at this time
    noteLast();
  }

  // Returns the time until all relaxations have ended.
  Milliseconds left() const {
    const auto last = last_.load(std::memory_order_relaxed);
    if (last == 0) {
      return Milliseconds(0);
    }
    const auto left = Clock::time_point(Clock::duration(last)) - Clock::now();
    return std::max(std::chrono::duration_cast<Milliseconds>(left), Milliseconds(0));
  }

 private:
  void noteLast() REQUIRES(mutex_) {
    last_.store(
        ends_.empty() ? 0 : ends_.rbegin()->time_since_epoch().count(), std::memory_order_relaxed);
  }

  Mutex mutex_;
  std::multiset<Clock::time_point> ends_ GUARDED_BY(mutex_);  // of relaxations that go on
  std::atomic<Clock::rep> last_{0};                           // the last of them, or 0
};

}  // namespace torchcomms_pg
