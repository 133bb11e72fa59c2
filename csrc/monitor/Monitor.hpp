// The process's one monitor thread.
//
// It asks every watched object, a few times a second, whether one of its
// operations is overdue. It never takes the GIL, never calls into a library
// that may block, and ends no watched object. Knows nothing of torch.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/OutstandingTask.hpp"
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
    // Called from the monitor's thread, which holds a reference meanwhile, and no lock; returns
    // soon and does not throw.
    virtual void check(Clock::time_point now) noexcept = 0;
    // Ends what is in flight, for `why`. Otherwise same as check().
    virtual void giveUp(const char* why) noexcept = 0;
    // Returns the message of its failure; "": it has not failed.
    virtual std::string failureMessage() const = 0;
  };

  // Returns the monitor of this process. A forked child gets one of its own, since the parent's
  // thread does not exist there.
  static Monitor& get();

  // Keeps the monitor's threads running. Raises std::runtime_error if they cannot be started.
  class Hold {
   public:
    Hold() : monitor_(get()) { monitor_.enter(); }
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Monitor& monitor_;
  };

  // Makes a T, which is a Watched, and watches it until its last holder lets go of it. A destructor
  // may wait, for the monitor, too: where that holder is the monitor's thread, the object ends in
  // another. Raises std::runtime_error, and makes nothing, if the monitor's threads cannot be
  // started.
  template <class T, class... Args>
  static std::shared_ptr<T> watch(Args&&... args) {
    auto hold = std::make_shared<const Hold>();
    const std::shared_ptr<T> made(
        new T(std::forward<Args>(args)...),
        [hold = std::move(hold)](T* object) mutable { end(object, std::move(hold)); });
    get().add(made);
    return made;
  }

  // Runs `body` in a thread of its own; if none can be started, in a spare thread that was started
  // with the monitor's. Raises std::runtime_error if there is no Hold.
  void runApart(std::function<void()> body);

  // Makes every watched object give up what it has in flight.
  void giveUp(const char* why);

  // Returns when the thread has last come round; the epoch: it does not run.
  Clock::time_point lastRound() const {
    return Clock::time_point(Clock::duration(lastRound_.load(std::memory_order_relaxed)));
  }

  // Returns the messages of the watched objects that have failed.
  std::vector<std::string> failures();

 private:
  using List = std::vector<std::weak_ptr<Watched>>;

  static bool onItsThread();
  template <class T>
  static void end(T* object, std::shared_ptr<const Hold> hold) noexcept {
    if (!onItsThread()) {
      delete object;
      return;
    }
    try {
      get().runApart(
          [unfinished = OutstandingTask(), object, hold = std::move(hold)] { delete object; });
    } catch (const std::exception&) {
      // Leaks it: out of memory, and this is better than to wait for ever.
    }
  }

  void enter();
  void leave();
  void add(const std::shared_ptr<Watched>& watched);
  // Returns the list, which does not change: no lock is held while it is gone through.
  std::shared_ptr<const List> watched();
  void run();

  std::mutex lifecycle_;  // serializes enter and leave, so that start and join do not race
  int holds_ = 0;         // guarded by lifecycle_
  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<const List> watched_ = std::make_shared<const List>();
  std::mutex spareMutex_;
  std::unique_ptr<SpareThread> spare_;  // there as long as there is a Hold
  std::thread thread_;
  bool stop_ = false;
  std::atomic<Clock::rep> lastRound_{0};
};

}  // namespace torchcomms_pg
