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
// A thread spins before it sleeps, since a wake-up through the kernel takes up to a hundred
// microseconds: for that long if the last wait was over by then, and ever shorter if not. If
// another rank may need its CPU, the thread yields between two looks. Nothing changes the CPUs that
// a thread may use: they are its owner's.
class Waiter {
 public:
  Waiter(Segment& segment, int self) : segment_(segment), self_(self) {}

  // Returns once ready() is true. After anything that makes ready() true a rank, maybe this one,
  // must ring this rank's doorbell. Throws NcclError when the communicator has failed; also makes
  // it fail when a rank for which needs(rank) is true has left it or has died.
  template <class Ready, class Needs>
  void wait(const Ready& ready, const Needs& needs) const {
    if (!spinBriefly(ready)) waitLong(ready, needs, kAnyone, true);
  }

  // Same as wait(), where `peer` is the rank that rings.
  template <class Ready>
  void waitForPeer(int peer, const Ready& ready) const {
    if (!spinBriefly(ready)) waitLong(ready, [peer](int rank) { return rank == peer; }, peer, true);
  }

  // Same as wait(), but ignores that the communicator has failed: for ranks that meet after a
  // failure. Throws NcclError, without recording it, when a needed rank has left or died.
  void waitDespiteFailure(FunctionRef<bool()> ready, FunctionRef<bool(int)> needs) const {
    waitLong(ready, needs, kAnyone, false);
  }

  // Throws NcclError if a rank for which needs(rank) is true has left or died.
  void checkPeers(FunctionRef<bool(int)> needs) const;

  // Publishes the number of the CPU on which this rank runs.
  void noteCpu() const;

 private:
  static constexpr int kQuickChecks = 64;
  static constexpr int kAnyone = -1;
  // Longest spin time: longer than a wake-up through the kernel, so that ranks in step never sleep.
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

  // Returns whether another rank was last seen on the CPU of the calling thread: that rank cannot
  // go on while this thread spins.
  bool sharesCpu() const;
  void waitLong(
      FunctionRef<bool()> ready, FunctionRef<bool(int)> needs, int waker, bool watchFailure) const;
  bool spinThenYield(
      FunctionRef<bool()> ready,
      FunctionRef<bool()> failed,
      int waker,
      std::chrono::steady_clock::time_point begin) const;
  void adaptSpinTime(int waker, bool soon) const;
  void sleepUnless(int waker, FunctionRef<bool()> ready) const;

  Segment& segment_;
  const int self_;
  mutable std::atomic<std::chrono::microseconds::rep> patience_{kPatience.count()};
};

// Returns whether the largest group of this process has more ranks on this host than there are CPUs
// for its threads: then ranks yield instead of spinning.
bool crowded();

// Counts a group, of so many ranks on this host, while it lives.
class RanksOnHost {
 public:
  explicit RanksOnHost(int ranks);
  ~RanksOnHost();
  RanksOnHost(const RanksOnHost&) = delete;
  RanksOnHost& operator=(const RanksOnHost&) = delete;

 private:
  const int ranks_;
};

}  // namespace torchcomms_pg::shm
