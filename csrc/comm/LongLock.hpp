// A lock that a thread may hold while signal handlers run in it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "host/Interrupt.hpp"

namespace torchcomms_pg {

// Lock of a call that may wait for other ranks. Signal handlers may run in a thread that holds the
// lock or waits for it. A handler whose own thread holds the lock gets an error; with a std::mutex
// the handler would wait for itself.
class LongLock {
 public:
  // Releases the lock when destroyed.
  class [[nodiscard]] Held {
   public:
    explicit Held(LongLock& lock) : lock_(lock) {}
    ~Held() { lock_.release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    LongLock& lock_;
  };

  // Takes the lock. If the calling thread holds it already, calls `refuse`, which must throw. Calls
  // `urge` a few times a second while another thread holds the lock. Raises the exception of a
  // signal handler that raises meanwhile.
  template <class Refuse, class Urge>
  Held hold(const Refuse& refuse, const Urge& urge) {
    std::unique_lock lock(mutex_);
    while (holder_ != std::thread::id()) {
      if (holder_ == std::this_thread::get_id()) {
        lock.unlock();
        refuse();
      }
      lock.unlock();
      urge();
      if (host::interrupted()) {
        std::rethrow_exception(host::takeInterrupt());
      }
      lock.lock();
      released_.wait_for(lock, kLook, [this] { return holder_ == std::thread::id(); });
    }
    holder_ = std::this_thread::get_id();
    return Held(*this);
  }

 private:
  static constexpr std::chrono::milliseconds kLook{200};  // interval at which handlers run

  void release() {
    {
      const std::lock_guard lock(mutex_);
      holder_ = {};
    }
    released_.notify_one();
  }

  std::mutex mutex_;  // never held for long
  std::condition_variable released_;
  std::thread::id holder_;  // no thread if the lock is free
};

}  // namespace torchcomms_pg
