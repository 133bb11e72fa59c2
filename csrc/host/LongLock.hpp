// A lock that a thread may hold while signal handlers run in it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <thread>

#include "base/Mutex.hpp"
#include "host/Interrupt.hpp"

namespace torchcomms_pg {

// Lock of a call that may wait for other ranks. Signal handlers may run in a thread that holds the
// lock or waits for it. A handler whose own thread holds the lock gets an error; with a Mutex
// the handler would wait for itself.
class CAPABILITY("mutex") LongLock {
 public:
  // Holds the lock while it lives.
  class [[nodiscard]] SCOPED_CAPABILITY Held {
   public:
    // Takes the lock. If the calling thread holds it already, calls `refuse`, which must throw.
    // Calls `urge` a few times a second while another thread holds the lock. Raises the exception
    // of a signal handler that raises meanwhile.
    template <class Refuse, class Urge>
    Held(LongLock& lock, const Refuse& refuse, const Urge& urge) ACQUIRE(lock) : lock_(lock) {
      lock_.take(refuse, urge);
    }
    ~Held() RELEASE() { lock_.release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    LongLock& lock_;
  };

 private:
  static constexpr std::chrono::milliseconds kLook{200};  // interval at which handlers run

  template <class Refuse, class Urge>
  void take(const Refuse& refuse, const Urge& urge) {
    UniqueLock lock(mutex_);
    while (holder_ != std::thread::id()) {
      const bool own = holder_ == std::this_thread::get_id();
      lock.unlock();
      if (own) {
        refuse();
      }
      urge();
      if (host::interrupted()) {
        std::rethrow_exception(host::takeInterrupt());
      }
      lock.lock();
      released_.wait_for(
          lock, kLook, [this]() REQUIRES(mutex_) { return holder_ == std::thread::id(); });
    }
    holder_ = std::this_thread::get_id();
  }

  void release() {
    {
      const LockGuard lock(mutex_);
      holder_ = {};
    }
    released_.notify_one();
  }

  Mutex mutex_;  // never held for long
  std::condition_variable released_;
  std::thread::id holder_ GUARDED_BY(mutex_);  // no thread if the lock is free
};

}  // namespace torchcomms_pg
