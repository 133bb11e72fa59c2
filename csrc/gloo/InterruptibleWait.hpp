// Waits for Gloo during which the process's signals are handled.
#pragma once

#include <unistd.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <thread>

#include "base/Mutex.hpp"

namespace torchcomms_pg::gloo {

// Interval at which a waiting thread that runs signal handlers checks for signals.
constexpr std::chrono::milliseconds kSignalLook{200};

// Gloo's own timeout, which must never pass: the monitor keeps the deadlines.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

// Waits for Gloo's works. If the calling thread is the one that runs signal handlers, the main
// thread, a separate thread aborts the wait every kSignalLook; the caller then checks for signals
// and waits again. Gloo's waits do not check for signals, and a wait that times out ends the
// connections to all peers. A wait in another thread instead would cost two thread switches, a
// third of a small operation's time.
class InterruptibleWait {
 public:
  // Returns the process's object, which lives until the last caller releases it. A forked child
  // gets another object.
  static std::shared_ptr<InterruptibleWait> hold();
  ~InterruptibleWait();

  // Does what `work`.wait() does for a message, but never times out. Returns false if the wait was
  // aborted, by the separate thread or by another: the message is still under way, and the caller
  // may wait again. If no thread can be started, signal handlers run only after the message has
  // ended.
  bool wait(c10d::Work& work);

 private:
  void abortWaits();

  const pid_t pid_ = getpid();
  Mutex mutex_;
  std::condition_variable changed_;
  c10d::Work* waiting_ GUARDED_BY(mutex_) = nullptr;  // what the main thread waits for, or null
  bool idle_ GUARDED_BY(mutex_) = false;  // true while thread_ sleeps until the main thread waits
  bool closed_ GUARDED_BY(mutex_) = false;
  std::thread thread_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg::gloo
