#include "gloo/InterruptibleWait.hpp"

#include <system_error>

#include "base/NeverDestroyed.hpp"
#include "base/Thread.hpp"
#include "host/Interrupt.hpp"

namespace torchcomms_pg::gloo {

std::shared_ptr<InterruptibleWait> InterruptibleWait::hold() {
  // The reference to the process's object is never destroyed: groups may be dropped at exit.
  struct Shared {
    Mutex mutex;
    std::weak_ptr<InterruptibleWait> watch GUARDED_BY(mutex);
  };
  static auto& shared = neverDestroyed<Shared>();
  const LockGuard lock(shared.mutex);
  auto watch = shared.watch.lock();
  if (watch == nullptr || watch->pid_ != getpid()) {
    shared.watch = watch = std::make_shared<InterruptibleWait>();
  }
  return watch;
}

InterruptibleWait::~InterruptibleWait() {
  if (!thread_.joinable()) {
    return;
  }
  if (pid_ != getpid()) {  // the thread exists only in the parent
    thread_.detach();
    return;
  }
  {
    const LockGuard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

bool InterruptibleWait::wait(c10d::Work& work) {
  if (!host::runsHandlers()) {
    return work.wait(kNever);
  }
  struct Leaving {
    InterruptibleWait& self;
    ~Leaving() {
      const LockGuard lock(self.mutex_);
      self.waiting_ = nullptr;
    }
  } const leaving{*this};
  {
    const LockGuard lock(mutex_);
    if (!thread_.joinable()) {
      try {
        thread_ = startThread("tcpg_signals", [this] { abortWaits(); });
      } catch (const std::system_error&) {
        // The next wait tries to start the thread again.
      }
    }
    waiting_ = &work;
    if (idle_) {
      changed_.notify_one();
    }
  }
  return work.wait(kNever);
}

void InterruptibleWait::abortWaits() {
  UniqueLock lock(mutex_);
  while (!closed_) {
    idle_ = true;
    changed_.wait(lock, [this]() REQUIRES(mutex_) { return waiting_ != nullptr || closed_; });
    idle_ = false;
    const auto ended = [this]() REQUIRES(mutex_) { return closed_; };
    if (!changed_.wait_for(lock, kSignalLook, ended) && waiting_ != nullptr) {
      attempt([work = waiting_] { work->abort(); });  // else at the next look
    }
  }
}

}  // namespace torchcomms_pg::gloo
