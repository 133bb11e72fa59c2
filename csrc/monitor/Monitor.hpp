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

  // Interval of looks at operations, and so the resolution of deadlines.
  static constexpr std::chrono::milliseconds kTick{50};

  class Watched {
   public:
    virtual ~Watched() = default;
    // Called from the monitor's thread; returns soon and does not throw.
    virtual void check(Clock::time_point now) noexcept = 0;
    // Ends what is in flight, for `why`. Otherwise same as check().
    virtual void giveUp(const char* why) noexcept = 0;
    // Returns the message of its failure; "": it has not failed.
    virtual std::string failureMessage() const = 0;
  };

  // Returns the monitor of this process. A forked child gets one of its own, since the parent's
  // thread does not exist there.
  static Monitor& get();

  // Starts the thread with the first object; remove() ends it with the last. Raises
  // std::runtime_error, and watches nothing, if the thread cannot be started.
  void add(Watched* watched);

  // Runs `body` in a thread of its own; if none can be started, in a spare thread that was started
  // with the monitor's. Raises std::runtime_error if nothing is watched.
  void runApart(std::function<void()> body);

  // Makes every watched object give up what it has in flight.
  void giveUp(const char* why);

  // Returns when the thread has last come round; the epoch: it does not run.
  Clock::time_point lastRound() const {
    return Clock::time_point(Clock::duration(lastRound_.load(std::memory_order_relaxed)));
  }

  // Returns the messages of the watched objects that have failed.
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
  std::mutex spareMutex_;  // separate: the monitor's thread holds mutex_ while it checks
  std::unique_ptr<SpareThread> spare_;  // there as long as anything is watched
  std::thread thread_;
  bool stop_ = false;
  std::atomic<Clock::rep> lastRound_{0};
};

}  // namespace torchcomms_pg
