#include "shm/Wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <ctime>

#include "shm/Process.hpp"

namespace torchcomms_pg::shm {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than a wake-up through the kernel, so that ranks in step never sleep.
constexpr auto kSpin = std::chrono::microseconds(100);
// When ranks share CPUs, spinning takes time from the rank waited for.
constexpr int kYields = 20;
constexpr timespec kSleep{0, 100'000'000};
constexpr auto kLifeCheck = std::chrono::milliseconds(250);

std::atomic<int> ranksOnHost{1};

int cpuCount() {
  static const int count = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }();
  return count;
}

}  // namespace

void noteRanksOnHost(int ranks) {
  int known = ranksOnHost.load(std::memory_order_relaxed);
  while (known < ranks && !ranksOnHost.compare_exchange_weak(known, ranks)) {
  }
}

void Waiter::sleepUnless(FunctionRef<bool()> ready) const {
  Doorbell& bell = segment_.state(self_).bell;
  struct Sleeper {
    Doorbell& bell;
    explicit Sleeper(Doorbell& bell) : bell(bell) { bell.sleepers.fetch_add(1); }
    ~Sleeper() { bell.sleepers.fetch_sub(1); }
  } sleeper(bell);
  const uint32_t rings = bell.rings.load(std::memory_order_acquire);
  // Pairs with the fence in Segment::ring: either the publisher sees the
  // sleeper, or the sleeper sees what was published.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!ready()) syscall(SYS_futex, &bell.rings, FUTEX_WAIT, rings, &kSleep, nullptr, 0);
}

void Waiter::checkPeers(FunctionRef<bool(int)> needs) const {
  const uint32_t ownPid = processId();
  for (int rank = 0; rank < segment_.size(); ++rank) {
    if (rank == self_ || !needs(rank)) continue;
    const RankState& state = segment_.state(rank);
    const uint32_t pid = state.pid.load(std::memory_order_acquire);
    if (pid == 0) continue;  // has not joined
    const std::string who = "rank " + std::to_string(rank);
    const Phase phase = state.phase.load(std::memory_order_acquire);
    if (phase == Phase::departed) {
      throw Failure(ncclRemoteError, who + " destroyed its communicator", {rank});
    }
    if (phase == Phase::aborted) {
      throw Failure(
          ncclRemoteError,
          who + " (pid " + std::to_string(pid) + ") aborted the communicator",
          {rank});
    }
    if (pid != ownPid && !processAlive(pid, state.startTime.load(std::memory_order_acquire))) {
      throw Failure(ncclRemoteError, who + " (pid " + std::to_string(pid) + ") died", {rank});
    }
  }
}

void Waiter::waitLong(
    FunctionRef<bool()> ready, FunctionRef<bool(int)> needs, bool watchFailure) const {
  const auto failed = [&] { return watchFailure && segment_.failed(); };
  if (ranksOnHost.load(std::memory_order_relaxed) <= cpuCount()) {
    const auto end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return;
        pauseCpu();
      }
    } while (!failed() && Clock::now() < end);
  } else {
    for (int i = 0; i < kYields && !failed(); ++i) {
      if (ready()) return;
      sched_yield();
    }
  }
  const auto left = [&] {
    for (int rank = 0; rank < segment_.size(); ++rank) {
      if (rank == self_ || !needs(rank)) continue;
      if (segment_.state(rank).phase.load(std::memory_order_acquire) > Phase::joined) return true;
    }
    return false;
  };
  auto nextLifeCheck = Clock::now() + kLifeCheck;
  for (;;) {
    const auto now = Clock::now();
    const bool lookForDead = now >= nextLifeCheck;
    if (lookForDead) nextLifeCheck = now + kLifeCheck;
    // A rank that has left or died may have done before what we wait for.
    if (left() || lookForDead) {
      try {
        checkPeers(needs);
      } catch (const Failure& failure) {
        if (ready()) return;
        if (!watchFailure) throw;
        segment_.fail(failure);
      }
    }
    if (ready()) return;
    if (failed()) throw segment_.failure();
    if (segment_.state(self_).phase.load(std::memory_order_acquire) == Phase::aborted) {
      throw Failure(ncclInvalidUsage, "this rank has aborted the communicator");
    }
    sleepUnless([&] { return ready() || failed(); });
  }
}

}  // namespace torchcomms_pg::shm
