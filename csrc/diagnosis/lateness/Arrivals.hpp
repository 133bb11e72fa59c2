// Records when a rank arrives at the collectives of a group, and how long it waits for other ranks.
// Independent of torch.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/Mutex.hpp"

namespace torchcomms_pg {

// A rank's report of its arrivals: lists of equal length. Times are microseconds, and begin at 0
// with the first arrival.
struct Arrivals {
  std::vector<uint64_t> seqs;     // numbers of the group's collectives, ascending
  std::vector<int64_t> at;        // time of the arrival, by the rank's own clock
  std::vector<int64_t> waited;    // time that the thread has waited for others, in all groups
  std::vector<int64_t> here;      // time that threads have waited in collectives of this group
  std::vector<uint64_t> threads;  // number of the thread; waits of two threads do not compare

  static void fields(auto& self, auto& visit) {
    visit(self.seqs, self.at, self.waited, self.here, self.threads);
  }
};

// The time that the calling thread has waited for other ranks, in operations of all groups.
class WaitedTime {
 public:
  using Duration = std::chrono::steady_clock::duration;

  static void add(Duration time) { ofThread().waited += time; }
  static Duration get() { return ofThread().waited; }
  // Returns the thread's number, which no other thread of this process gets.
  static uint64_t thread() { return ofThread().number; }

 private:
  struct Thread {
    Duration waited{};
    const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  };
  static Thread& ofThread() {
    static thread_local Thread thread;
    return thread;
  }
  static inline std::atomic<uint64_t> next_{1};
};

// Keeps this rank's arrivals at a group's latest collectives. If collectives are frequent, keeps
// only every second, fourth or eighth and so on, by their numbers, so that all ranks keep the same
// collectives. The kept arrivals then span half a minute: over a shorter time, the load of a core
// is chance. Thread-safe.
class ArrivalLog {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMost = 128;
  static constexpr Clock::duration kSpan = std::chrono::seconds(30);

  // Records the arrival of the calling thread, which has waited for `waited` so far.
  void note(
      uint64_t seq, Clock::time_point at, Clock::duration waited = WaitedTime::get(),
      uint64_t thread = WaitedTime::thread()) {
    const bool kept = (seq & (stride_.load(std::memory_order_relaxed) - 1)) == 0;
    if (kept || at.time_since_epoch().count() > slowFrom_.load(std::memory_order_relaxed)) {
      add({seq, at, waited, Clock::duration(here_.load(std::memory_order_relaxed)), thread});
    }
  }
  // Records that a thread has waited for `time` in a collective of the group.
  void addWait(Clock::duration time) { here_.fetch_add(time.count(), std::memory_order_relaxed); }

  // Return the recorded arrivals, and the number of the last one, or 0 if none is recorded.
  Arrivals get() const;
  uint64_t latest() const { return latest_.load(std::memory_order_relaxed); }

 private:
  struct Point {
    uint64_t seq;
    Clock::time_point at;
    Clock::duration waited;
    Clock::duration here;
    uint64_t thread;
  };

  void add(Point point);
  Point& pointAt(size_t place) REQUIRES(mutex_) { return points_[(first_ + place) % kMost]; }

  std::atomic<uint64_t> stride_{1};  // a power of two
  // time until which the next arrival is expected; if it is later, arrivals have become rare
  std::atomic<Clock::rep> slowFrom_{0};
  std::atomic<Clock::rep> here_{0};
  std::atomic<uint64_t> latest_{0};
  mutable Mutex mutex_;
  std::array<Point, kMost> points_ GUARDED_BY(mutex_);  // a ring buffer
  size_t first_ GUARDED_BY(mutex_) = 0;
  size_t size_ GUARDED_BY(mutex_) = 0;
};

}  // namespace torchcomms_pg
