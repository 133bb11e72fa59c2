// Waiting for another rank: the one place that decides between spinning,
// yielding and sleeping, and that notices failed, departed and dead ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <type_traits>

#include "shm/segment/Segment.hpp"

namespace torchcomms_pg::shm {

// A reference to a callable that outlives the call it is passed to.
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
// A thread looks for a while before it sleeps, since a wake-up through the
// kernel takes up to a hundred microseconds: for as long as that where the last
// wait was over by then, and ever shorter where not. Where another rank may need
// its CPU, it yields between two looks, and where they share it for long although
// there are enough, it moves to another.
class Waiter {
 public:
  Waiter(Segment& segment, int self) : segment_(segment), self_(self) {}

  // Returns once ready() is true. ready() must turn true through something
  // after which a rank, maybe this one, rings this rank's doorbell. Throws Failure when the
  // communicator has failed; also makes it fail when a rank for which
  // needs(rank) is true has left it or has died.
  template <class Ready, class Needs>
  void wait(const Ready& ready, const Needs& needs) const {
    if (!spinBriefly(ready)) waitLong(ready, needs, kAnyone, true);
  }

  // The same where `peer` is the one that rings.
  template <class Ready>
  void waitForPeer(int peer, const Ready& ready) const {
    if (!spinBriefly(ready)) waitLong(ready, [peer](int rank) { return rank == peer; }, peer, true);
  }

  // Like wait, but ignores that the communicator has failed: for those who
  // meet after a failure. Throws Failure, without recording it, when a needed
  // rank has left or died.
  void waitDespiteFailure(FunctionRef<bool()> ready, FunctionRef<bool(int)> needs) const {
    waitLong(ready, needs, kAnyone, false);
  }

  // Throws Failure if a rank for which needs(rank) is true has left or died.
  void checkPeers(FunctionRef<bool(int)> needs) const;

  // Lets the other ranks know on which CPU this one runs.
  void noteCpu() const;

 private:
  static constexpr int kQuickChecks = 64;
  static constexpr int kAnyone = -1;
  // Longer than a wake-up through the kernel, so that ranks in step never sleep.
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

  // Whether another rank was last seen on the CPU of the calling thread: it
  // cannot go on while this thread spins.
  bool sharesCpu() const;
  void waitLong(
      FunctionRef<bool()> ready, FunctionRef<bool(int)> needs, int ringer, bool watchFailure) const;
  bool spinThenYield(
      FunctionRef<bool()> ready,
      FunctionRef<bool()> failed,
      int ringer,
      std::chrono::steady_clock::time_point begin) const;
  void migrateToFreeCpu() const;
  void adaptSpinTime(int ringer, bool soon) const;
  void sleepUnless(int ringer, FunctionRef<bool()> ready) const;

  Segment& segment_;
  const int self_;
  mutable std::atomic<std::chrono::microseconds::rep> patience_{kPatience.count()};
  mutable std::atomic<int> shared_{0};  // looks at a shared CPU, one after another
};

// Tells the wait policy how many ranks share this host: beyond the number of
// CPUs they yield instead of spinning. The largest number seen by this process
// counts.
void noteRanksOnHost(int ranks);

}  // namespace torchcomms_pg::shm
