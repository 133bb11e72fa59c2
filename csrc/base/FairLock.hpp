// A lock that threads get in the order in which they ask for it.
#pragma once

#include <condition_variable>
#include <cstdint>

#include "base/Mutex.hpp"

namespace torchcomms_pg {

// Lock of something that one thread may use again and again, and each time for long. A Mutex would
// mostly go to that thread again, since a thread that waits takes longer to wake up.
class CAPABILITY("mutex") FairLock {
 public:
  // Holds the lock while it lives. Blocks until all threads that have asked before are done.
  class [[nodiscard]] SCOPED_CAPABILITY Held {
   public:
    explicit Held(FairLock& lock) ACQUIRE(lock) : lock_(lock) { lock_.take(); }
    ~Held() RELEASE() { lock_.release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    FairLock& lock_;
  };

 private:
  void take() {
    UniqueLock lock(mutex_);
    const auto ticket = issued_++;
    passed_.wait(lock, [&]() REQUIRES(mutex_) { return served_ == ticket; });
  }

  void release() {
    {
      const LockGuard lock(mutex_);
      ++served_;
    }
    passed_.notify_all();
  }

  Mutex mutex_;  // never held for long
  std::condition_variable passed_;
  uint64_t issued_ GUARDED_BY(mutex_) = 0;
  uint64_t served_ GUARDED_BY(mutex_) = 0;
};

}  // namespace torchcomms_pg
