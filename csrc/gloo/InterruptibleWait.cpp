#include "gloo/InterruptibleWait.hpp"

#include <unistd.h>

#include <condition_variable>
#include <system_error>
#include <thread>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/Thread.hpp"
#include "host/Interrupt.hpp"

namespace torchcomms_pg::gloo {

// State for waits in the one thread of a process that runs signal handlers: the main thread.
struct InterruptibleWait::State {
  const pid_t pid = getpid();
  Mutex mutex;
  std::condition_variable changed;
  c10d::Work* waiting GUARDED_BY(mutex) = nullptr;  // what the main thread waits for, or null
  bool idle GUARDED_BY(mutex) = false;  // true while `thread` sleeps until the main thread waits
  bool closed GUARDED_BY(mutex) = false;
  std::thread thread GUARDED_BY(mutex);

  void enter(c10d::Work& work) {
    const LockGuard lock(mutex);
    if (!thread.joinable()) {
      try {
        thread = startThread("tcpg_signals", [this] { run(); });
      } catch (const std::system_error&) {
        // The next wait tries to start the thread again.
      }
    }
    waiting = &work;
    if (idle) {
      changed.notify_one();
    }
  }

  void leave() {
    const LockGuard lock(mutex);
    waiting = nullptr;
  }

  void run() {
    UniqueLock lock(mutex);
    while (!closed) {
      idle = true;
      changed.wait(lock, [this]() REQUIRES(mutex) { return waiting != nullptr || closed; });
      idle = false;
      const auto ended = [this]() REQUIRES(mutex) { return closed; };
      if (!changed.wait_for(lock, kSignalLook, ended) && waiting != nullptr) {
        attempt([work = waiting] { work->abort(); });  // else at the next look
      }
    }
  }
};

std::shared_ptr<InterruptibleWait> InterruptibleWait::hold() {
  // The reference to the process's object is never destroyed: groups may be dropped at exit.
  struct Shared {
    Mutex mutex;
    std::weak_ptr<InterruptibleWait> watch GUARDED_BY(mutex);
  };
  static auto& shared = neverDestroyed<Shared>();
  const LockGuard lock(shared.mutex);
  auto watch = shared.watch.lock();
  if (watch == nullptr || watch->state_->pid != getpid()) {
    shared.watch = watch = std::make_shared<InterruptibleWait>();
  }
  return watch;
}

InterruptibleWait::InterruptibleWait() : state_(std::make_unique<State>()) {}

InterruptibleWait::~InterruptibleWait() {
  if (!state_->thread.joinable()) {
    return;
  }
  if (state_->pid != getpid()) {  // the thread exists only in the parent
    state_->thread.detach();
    return;
  }
  {
    const LockGuard lock(state_->mutex);
    state_->closed = true;
  }
  state_->changed.notify_one();
  state_->thread.join();
}

bool InterruptibleWait::wait(c10d::Work& work) {
  if (!host::runsHandlers()) {
    return work.wait(kNever);
  }
  struct Entered {
    State& state;
    Entered(State& state, c10d::Work& work) : state(state) { state.enter(work); }
    ~Entered() { state.leave(); }
  };
  const Entered entered(*state_, work);
  return work.wait(kNever);
}

}  // namespace torchcomms_pg::gloo
