// When a rank has come to the collectives of a group, and how long it has waited for others
// meanwhile. Knows nothing of torch.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace torchcomms_pg {

// What a rank tells of its arrivals: lists of one length, times in microseconds since the first.
struct Arrivals {
  std::vector<uint64_t> seqs;     // places among the group's collectives, ascending
  std::vector<int64_t> at;        // time of arrival, by the rank's own clock
  std::vector<int64_t> waited;    // time that the thread has waited for others, in all groups
  std::vector<int64_t> here;      // time that threads have waited in collectives of this group
  std::vector<uint64_t> threads;  // number of the thread: its waits say nothing of another's

  static void fields(auto& self, auto& visit) {
    visit(self.seqs, self.at, self.waited, self.here, self.threads);
  }
};

// Time that the calling thread has waited for others, in operations of any group.
class WaitedTime {
 public:
  using Duration = std::chrono::steady_clock::duration;

  static void add(Duration time) { ofThread().waited += time; }
  static Duration get() { return ofThread().waited; }
  // Returns a number of the thread, which no other has had.
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

// The arrivals of this rank at a group's latest collectives. Of many in a short time only every
// second, fourth and so on is kept, by its place, so that those of all ranks can be compared and
// tell of half a minute: in less, the load of a core is chance. Thread-safe.
class ArrivalLog {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMost = 128;
  static constexpr Clock::duration kSpan = std::chrono::seconds(30);

  // Notes that the calling thread, which has waited for `waited` so far, comes to a collective.
  void note(
      uint64_t seq,
      Clock::time_point at,
      Clock::duration waited = WaitedTime::get(),
      uint64_t thread = WaitedTime::thread()) {
    const bool kept = (seq & (stride_.load(std::memory_order_relaxed) - 1)) == 0;
    if (kept || at.time_since_epoch().count() > slowFrom_.load(std::memory_order_relaxed)) {
      add({seq, at, waited, Clock::duration(here_.load(std::memory_order_relaxed)), thread});
    }
  }
  // Notes that a thread has waited in a collective.
  void addWait(Clock::duration time) { here_.fetch_add(time.count(), std::memory_order_relaxed); }

  // Returns the latest, and the place of the latest collective that it tells of; 0: none.
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
  Point& pointAt(size_t place) { return points_[(first_ + place) % kMost]; }

  std::atomic<uint64_t> stride_{1};      // a power of two
  std::atomic<Clock::rep> slowFrom_{0};  // a collective from then on says that they come slowly
  std::atomic<Clock::rep> here_{0};
  std::atomic<uint64_t> latest_{0};
  mutable std::mutex mutex_;
  std::array<Point, kMost> points_;  // a ring
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace torchcomms_pg
