// Waits for Gloo that notice the signals of the process.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>

namespace torchcomms_pg::gloo {

// Interval at which a thread that runs the handlers of signals looks for them while it waits.
constexpr std::chrono::milliseconds kSignalLook{200};

// Gloo's own timeout, which must never pass: the monitor keeps the deadlines.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

// Aborts Gloo's waits a few times a second, by a thread for that, in the thread that runs signal
// handlers: the caller looks for signals and waits again. Gloo's waits look for no signals, and one
// that times out ends the connections of all ranks. A rank that waited in another thread instead
// would pay two changes of threads for each operation, a third of a small one.
class SignalWatch {
 public:
  // Returns the process's watch, which lasts as long as it is held. A forked child has its own.
  static std::shared_ptr<SignalWatch> hold();

  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  // Same as `work`.wait() for a message, but never times out; false: the wait has been aborted,
  // while the message is still under way and can be waited for again. If no thread can be started,
  // signals wait until the message has come.
  bool wait(c10d::Work& work);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg::gloo
