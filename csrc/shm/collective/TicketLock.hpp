// The order in which one rank executes a communicator's collectives.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>

#include "base/Mutex.hpp"
#include "shm/Host.hpp"
#include "shm/segment/Segment.hpp"

namespace torchcomms_pg::shm {

// Hands out a ticket when collectives are issued, and lets any threads execute the collectives in
// the order of their tickets. Thread-safe.
class TicketLock {
 public:
  uint64_t take() { return issued_.fetch_add(1); }

  // Returns whether all earlier tickets have passed.
  bool isNext(uint64_t ticket) const { return passed_.load() == ticket; }

  // Blocks until all earlier tickets have passed. Throws NcclError if the communicator fails, since
  // an earlier ticket may then never pass, or if a signal interrupts the wait.
  void await(uint64_t ticket, const Segment& segment) {
    if (!isNext(ticket)) {
      UniqueLock lock(mutex_);
      while (!isNext(ticket)) {
        if (segment.failed()) throw segment.failure();
        if (changed_.wait_for(lock, kSlice) == std::cv_status::no_timeout) continue;
        lock.unlock();
        if (interrupted()) {
          throw NcclError(ncclRemoteError, "interrupted by a signal, behind another operation");
        }
        lock.lock();
      }
    }
    if (segment.failed()) throw segment.failure();
  }

  // Lets the next ticket's collective go on. Has no effect if await() has thrown for this ticket.
  void pass(uint64_t ticket) {
    uint64_t expected = ticket;
    if (!passed_.compare_exchange_strong(expected, ticket + 1)) return;
    // Threads wait only if later tickets exist.
    if (issued_.load() == ticket + 1) return;
    LockGuard lock(mutex_);
    changed_.notify_all();
  }

 private:
  static constexpr std::chrono::milliseconds kSlice{100};

  std::atomic<uint64_t> issued_{0};
  std::atomic<uint64_t> passed_{0};
  Mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace torchcomms_pg::shm
