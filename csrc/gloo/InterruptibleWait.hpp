// Waits for Gloo during which the process's signals are handled.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>

namespace torchcomms_pg::gloo {

// Interval at which a waiting thread that runs signal handlers checks for signals.
constexpr std::chrono::milliseconds kSignalLook{200};

// Gloo's own timeout, which must never pass: the monitor keeps the deadlines.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

// Waits for Gloo's works. If the calling thread is the one that runs signal handlers, a separate
// thread aborts the wait every kSignalLook; the caller then checks for signals and waits again.
// Gloo's waits do not check for signals, and a wait that times out ends the connections to all
// peers. A wait in another thread instead would cost two thread switches, a third of a small
// operation's time.
class InterruptibleWait {
 public:
  // Returns the process's object, which lives until the last caller releases it. A forked child
  // gets another object.
  static std::shared_ptr<InterruptibleWait> hold();

  InterruptibleWait();
  ~InterruptibleWait();
  InterruptibleWait(const InterruptibleWait&) = delete;
  InterruptibleWait& operator=(const InterruptibleWait&) = delete;

  // Does what `work`.wait() does for a message, but never times out. Returns false if the wait was
  // aborted, by the separate thread or by another: the message is still under way, and the caller
  // may wait again. If no thread can be started, signal handlers run only after the message has
  // ended.
  bool wait(c10d::Work& work);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg::gloo
