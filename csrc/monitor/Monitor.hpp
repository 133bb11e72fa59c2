// The process's one monitor thread.
//
// It asks every watched object, a few times a second, whether one of its
// operations is overdue. It never takes the GIL, never calls into a library
// that may block, and frees nothing. Knows nothing of torch.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "monitor/SpareThread.hpp"

namespace torchcomms_pg {

class Monitor {
 public:
  using Clock = std::chrono::steady_clock;

  // How often operations are looked at, and so the resolution of deadlines.
  static constexpr std::chrono::milliseconds kTick{50};

  class Watched {
   public:
    virtual ~Watched() = default;
    // Called from the monitor's thread; returns soon and does not throw.
    virtual void check(Clock::time_point now) noexcept = 0;
    // Ends what is in flight, for `why`. As check() otherwise.
    virtual void giveUp(const char* why) noexcept = 0;
    // What it failed with; "": it has not.
    virtual std::string failureMessage() const = 0;
  };

  // The monitor of this process. A forked child gets one of its own, since
  // the parent's thread does not exist there.
  static Monitor& get();

  // Starts the thread with the first object, ends it with the last. Raises std::runtime_error,
  // and watches nothing, where it cannot be started.
  void add(Watched* watched);

  // Runs `body` in a thread of its own; where none can be started, in the one that was started
  // with the monitor's for that. Raises std::runtime_error where nothing is watched.
  void runApart(std::function<void()> body);

  // Has every watched object give up what it has in flight.
  void giveUp(const char* why);

  // When its thread has last come round; the epoch: it does not run.
  Clock::time_point lastRound() const {
    return Clock::time_point(Clock::duration(lastRound_.load(std::memory_order_relaxed)));
  }

  // What the watched objects that have failed say.
  std::vector<std::string> failures();

  // Returns when no check of `watched` is running. Not to be called from
  // check().
  void remove(Watched* watched);

 private:
  void run();

  std::mutex lifecycle_;  // serializes add and remove, so that start and join do not race
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Watched*> watched_;
  std::mutex spareMutex_;  // apart: the monitor's thread holds the other while it checks
  std::unique_ptr<SpareThread> spare_;  // as long as anything is watched
  std::thread thread_;
  bool stop_ = false;
  std::atomic<Clock::rep> lastRound_{0};
};

}  // namespace torchcomms_pg
