#include "gloo/SignalWatch.hpp"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "shm/Interrupt.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Gloo's own timeout, which must never pass: the monitor keeps the deadlines.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

// Aborts the waits of one thread, of which a process has no more: its main thread.
class Watch {
 public:
  // Of the thread that runs handlers. Leaked: its own thread may be there until the process ends. A
  // forked child has another one.
  static Watch& get() {
    static Watch* instance = nullptr;
    static pid_t pid = 0;
    if (pid != getpid()) {
      pid = getpid();
      instance = new Watch();
    }
    return *instance;
  }

  void enter(c10d::Work& work) {
    const std::lock_guard lock(mutex_);
    if (!running_) {
      try {
        std::thread([this] { run(); }).detach();
        running_ = true;
      } catch (const std::system_error&) {
        // No thread can be started: signals wait until the message has come.
      }
    }
    waiting_ = &work;
    if (idle_) {
      begun_.notify_one();
    }
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    waiting_ = nullptr;
  }

 private:
  void run() {
    pthread_setname_np(pthread_self(), "tcpg_signals");
    std::unique_lock lock(mutex_);
    for (;;) {
      idle_ = true;
      begun_.wait(lock, [this] { return waiting_ != nullptr; });
      idle_ = false;
      lock.unlock();
      std::this_thread::sleep_for(kSignalLook);
      lock.lock();
      if (waiting_ != nullptr) {
        waiting_->abort();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable begun_;
  c10d::Work* waiting_ = nullptr;
  bool running_ = false;
  bool idle_ = false;  // its thread sleeps until something is waited for
};

}  // namespace

bool waitWatched(c10d::Work& work) {
  if (!shm::runsHandlers()) {
    return work.wait(kNever);
  }
  struct Entered {
    explicit Entered(c10d::Work& work) { Watch::get().enter(work); }
    ~Entered() { Watch::get().leave(); }
  };
  const Entered entered(work);
  return work.wait(kNever);
}

}  // namespace torchcomms_pg::gloo
