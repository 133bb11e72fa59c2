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

// Aborts Gloo's waits in the thread that runs signal handlers a few times a second, from a separate
// thread: the caller then checks for signals and waits again. Gloo's waits do not check for
// signals, and a wait that times out ends the connections of all ranks. Waiting in another thread
// instead would cost two thread switches for each operation, a third of the time of a small one.
class InterruptibleWait {
 public:
  // Returns the process's watch, which exists as long as a caller holds it. A forked child gets its
  // own.
  static std::shared_ptr<InterruptibleWait> hold();

  InterruptibleWait();
  ~InterruptibleWait();
  InterruptibleWait(const InterruptibleWait&) = delete;
  InterruptibleWait& operator=(const InterruptibleWait&) = delete;

  // Same as `work`.wait() for a message, but never times out. Returns false if the watch has
  // aborted the wait: the message is still under way, and the caller may wait again. If no thread
  // can be started, signals are handled only after the message has arrived.
  bool wait(c10d::Work& work);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg::gloo
