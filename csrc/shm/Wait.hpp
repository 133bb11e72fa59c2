// Waiting for another rank: the one place that decides between spinning,
// yielding and sleeping, and that notices failed, departed and dead ranks.
#pragma once

#include <memory>
#include <type_traits>

#include "shm/Segment.hpp"

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
class Waiter {
 public:
  Waiter(Segment& segment, int self) : segment_(segment), self_(self) {}

  // Returns once ready() is true. ready() must turn true through something
  // that is followed by a ring of this rank's doorbell. Throws Failure when the
  // communicator has failed; also makes it fail when a rank for which
  // needs(rank) is true has left it or has died.
  template <class Ready, class Needs>
  void wait(const Ready& ready, const Needs& needs) const {
    for (int i = 0; i < kQuickChecks; ++i) {
      if (ready()) return;
      pauseCpu();
    }
    waitLong(ready, needs, true);
  }

  template <class Ready>
  void waitForPeer(int peer, const Ready& ready) const {
    wait(ready, [peer](int rank) { return rank == peer; });
  }

  // Like wait, but ignores that the communicator has failed: for those who
  // meet after a failure. Throws Failure, without recording it, when a needed
  // rank has left or died.
  void waitDespiteFailure(FunctionRef<bool()> ready, FunctionRef<bool(int)> needs) const {
    waitLong(ready, needs, false);
  }

  // Throws Failure if a rank for which needs(rank) is true has left or died.
  void checkPeers(FunctionRef<bool(int)> needs) const;

 private:
  static constexpr int kQuickChecks = 64;

  void waitLong(FunctionRef<bool()> ready, FunctionRef<bool(int)> needs, bool watchFailure) const;
  void sleepUnless(FunctionRef<bool()> ready) const;

  Segment& segment_;
  const int self_;
};

// Tells the wait policy how many ranks share this host: beyond the number of
// CPUs they yield and sleep instead of spinning. The largest number seen by
// this process counts.
void noteRanksOnHost(int ranks);

}  // namespace torchcomms_pg::shm
