// Waits for Gloo that see the signals of the process.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>

namespace torchcomms_pg::gloo {

// How often a thread that runs the handlers of signals looks for them while it waits.
constexpr std::chrono::milliseconds kSignalLook{200};

// Gloo's waits look for no signals, and one that times out ends the connections of all ranks. In
// the thread that runs the handlers, a wait is therefore aborted a few times a second, by a thread
// for that: the caller looks for signals and waits again. A rank that waits in another thread
// instead would pay two changes of threads for each operation, a third of a small one.
class SignalWatch {
 public:
  // That of the process, which lasts as long as somebody holds it. A forked child has one of its
  // own.
  static std::shared_ptr<SignalWatch> hold();

  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  // As `work`.wait(), of a message, which never times out; false: the wait has been aborted, while
  // the message is still under way and can be waited for again. Where no thread can be started,
  // signals wait until the message has come.
  bool wait(c10d::Work& work);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg::gloo
