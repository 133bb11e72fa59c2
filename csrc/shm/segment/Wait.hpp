// Waits for other ranks: the only code that decides between spinning, yielding and sleeping, and
// that notices failed, departed and dead ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <type_traits>

#include "shm/segment/Segment.hpp"

namespace torchcomms_pg::shm {

// A reference to a callable, valid during the call to which it is passed.
template <class Function>
class FunctionRef;

template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, Args... args) -> Result {
          return (*static_cast<std::remove_reference_t<F>*>(object))(args...);
        }) {}
  Result operator()(Args... args) const { return call_(object_, args...); }

 private:
  void* object_;
  Result (*call_)(void*, Args...);
};

inline void pauseCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits on behalf of one rank. Any number of threads may wait at once.
//
// A thread spins before it sleeps, since a wake-up through the kernel takes up to a hundred
// microseconds. It spins for kPatience if the last wait that outlasted kQuickChecks ended within
// that time. Each longer wait halves the spin time. If another rank may need the thread's CPU, the
// thread yields between two checks. Waiting never changes the CPUs that a thread may use, since the
// caller has chosen them.
class Waiter {
 public:
  Waiter(Segment& segment, int self) : segment_(segment), self_(self) {}

  // Returns once ready() is true. The rank that makes ready() true, possibly this one, must call
  // Segment::wakeRank or wakeAll. Throws NcclError if the communicator has failed or a signal
  // interrupts the thread. Fails the communicator if a rank for which needs(rank) is true has left
  // or died.
  template <class Ready, class Needs>
  void wait(const Ready& ready, const Needs& needs) const {
    if (!spinBriefly(ready)) waitLong(ready, needs, kAnyone, true);
  }

  // Same as wait(), if only `peer` can make ready() true.
  template <class Ready>
  void waitForPeer(int peer, const Ready& ready) const {
    if (!spinBriefly(ready)) waitLong(ready, [peer](int rank) { return rank == peer; }, peer, true);
  }

  // Same as wait(), but ignores a failure of the communicator, for ranks that shrink it afterwards.
  // If a needed rank has left or died, throws NcclError and does not fail the communicator.
  void waitDespiteFailure(FunctionRef<bool()> ready, FunctionRef<bool(int)> needs) const {
    waitLong(ready, needs, kAnyone, false);
  }

  // Throws NcclError if a rank for which needs(rank) is true has left or died.
  void checkPeers(FunctionRef<bool(int)> needs) const;

  // Publishes the number of the calling thread's CPU in Header::cpus, and returns it as stored
  // there.
  uint16_t noteCpu() const;

 private:
  static constexpr int kQuickChecks = 64;
  static constexpr int kAnyone = -1;
  // Longest spin time. A wake-up through the kernel takes less, so ranks that keep arriving
  // together never sleep.
  static constexpr std::chrono::microseconds kPatience{100};

  template <class Ready>
  bool spinBriefly(const Ready& ready) const {
    if (ready()) return true;
    if (sharesCpu()) return false;
    for (int i = 0; i < kQuickChecks; ++i) {
      pauseCpu();
      if (ready()) return true;
    }
    return false;
  }

  // Returns whether another rank was last seen on the calling thread's CPU. Such a rank cannot run
  // while this thread spins.
  bool sharesCpu() const;
  void waitLong(
      FunctionRef<bool()> ready, FunctionRef<bool(int)> needs, int waker, bool watchFailure) const;
  bool spinThenYield(
      FunctionRef<bool()> ready, FunctionRef<bool()> failed, int waker,
      std::chrono::steady_clock::time_point begin) const;
  void adaptSpinTime(int waker, bool soon) const;
  void sleepUnless(int waker, FunctionRef<bool()> ready) const;

  Segment& segment_;
  const int self_;
  mutable std::atomic<std::chrono::microseconds::rep> patience_{kPatience.count()};
};

// Returns whether a group of this process has more ranks on this host than CPUs on which these
// ranks may run. Then waiting threads yield instead of spinning.
bool crowded();

// Makes crowded() return true, while the object lives, if the group's ranks on this host outnumber
// their CPUs.
class RanksOnHost {
 public:
  // Publishes the CPUs on which the calling thread may run for `rank`.
  RanksOnHost(Segment& segment, int rank);
  ~RanksOnHost();
  RanksOnHost(const RanksOnHost&) = delete;
  RanksOnHost& operator=(const RanksOnHost&) = delete;

  // Counts the CPUs that the ranks have published. Call it again once all ranks have joined.
  void count() const;

 private:
  Segment& segment_;
};

}  // namespace torchcomms_pg::shm
