// The process's only monitor thread.
//
// The thread has every watched object check 20 times a second whether an operation is overdue. It
// never takes the GIL, never calls into a library that may block, and destroys no watched object.
// Independent of torch.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "monitor/MonitorThread.hpp"
#include "monitor/SpareThread.hpp"

namespace torchcomms_pg {

class Monitor {
 public:
  using Clock = std::chrono::steady_clock;

  // Interval of the monitor's rounds, and so the resolution of deadlines.
  static constexpr std::chrono::milliseconds kTick{50};

  class Watched {
   public:
    virtual ~Watched() = default;
    // Checks the operations in flight. Called from the monitor's thread, which holds a reference to
    // the object and no lock. Must return soon.
    virtual void check(Clock::time_point now) noexcept REQUIRES(monitorThread) = 0;
    // Ends the operations in flight, for the reason `why`. Called as check() is, but from any
    // thread.
    virtual void abortInFlight(const char* why) noexcept = 0;
    // Returns the message of the object's failure, or "" if the object has not failed.
    virtual std::string failureMessage() const = 0;
  };

  // Returns the monitor of this process. A forked child gets its own, since the parent's thread
  // does not exist in the child.
  static Monitor& get();

  // Keeps the monitor's two threads running. Raises std::runtime_error if they cannot be started.
  class Hold {
   public:
    Hold() : monitor_(get()) { monitor_.enter(); }
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Monitor& monitor_;
  };

  // Makes a T, which derives from Watched, and watches it until its last reference is dropped. T's
  // destructor may wait, even for the monitor: if the monitor's thread drops the last reference,
  // another thread destroys the object. Raises std::runtime_error, and makes nothing, if the
  // monitor's threads cannot be started.
  template <class T, class... Args>
  static std::shared_ptr<T> watch(Args&&... args) {
    auto hold = std::make_shared<const Hold>();
    const std::shared_ptr<T> made(
        new T(std::forward<Args>(args)...),
        [hold = std::move(hold)](T* object) mutable { end(object, std::move(hold)); });
    get().add(made);
    return made;
  }

  // Attempts `body` in a new thread, or in the spare thread if no new thread can be started. Raises
  // std::runtime_error if neither is possible, since no Hold exists.
  void runDetached(std::function<void()> body);

  // Sets a function that the monitor's thread calls at the begin of each round; it must return
  // soon.
  static void setRound(void (*body)(Clock::time_point now) noexcept);

  // Makes every watched object end its operations in flight.
  void abortInFlight(const char* why);

  // Returns the time at which the latest round began, or the epoch if the thread does not run.
  Clock::time_point lastRound() const {
    return Clock::time_point(Clock::duration(lastRound_.load(std::memory_order_relaxed)));
  }

  // Returns the messages of the watched objects that have failed.
  std::vector<std::string> failures();

 private:
  using List = std::vector<std::weak_ptr<Watched>>;

  template <class T>
  static void end(T* object, std::shared_ptr<const Hold> hold) noexcept {
    if (!monitorThread.isMine()) {
      delete object;
      return;
    }
    try {
      get().runDetached(
          [unfinished = ExitGuard(), object, hold = std::move(hold)] { delete object; });
    } catch (const std::exception&) {
      // Leaks the object: memory has run out, and deleting it in this thread could wait forever.
    }
  }

  void enter();
  void leave();
  void add(const std::shared_ptr<Watched>& watched);
  // Returns the list of watched objects. A list never changes, so callers read it without a lock.
  std::shared_ptr<const List> watched();
  void run();

  // Serializes enter and leave, so that start and join do not race.
  Mutex lifecycle_ ACQUIRED_BEFORE(mutex_, spareMutex_);
  int holds_ GUARDED_BY(lifecycle_) = 0;
  std::thread thread_ GUARDED_BY(lifecycle_);
  Mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<const List> watched_ GUARDED_BY(mutex_) = std::make_shared<const List>();
  bool stop_ GUARDED_BY(mutex_) = false;
  Mutex spareMutex_;
  std::unique_ptr<SpareThread> spare_ GUARDED_BY(spareMutex_);  // null if no Hold exists
  std::atomic<Clock::rep> lastRound_{0};
};

}  // namespace torchcomms_pg
