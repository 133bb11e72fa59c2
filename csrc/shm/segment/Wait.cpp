#include "shm/segment/Wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <ctime>
#include <set>

#include "base/Mutex.hpp"
#include "base/Races.hpp"
#include "host/Limits.hpp"
#include "shm/Host.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Shortest spin time, after long waits. A longer one would take the CPU from a thread that could
// use it, such as the thread that computes this rank's next data.
constexpr microseconds kLeastPatience{5};

constexpr timespec kSleep{0, 100'000'000};
constexpr auto kLifeCheck = std::chrono::milliseconds(250);

// Returns the number of CPUs on which ranks that have joined may run, or the quota of CPU time of
// this process if that is less. Ranks in one container share the quota.
int cpuCount(Segment& segment) {
  static const int quota = host::cpuQuota();
  int allowed = 0;
  for (size_t word = 0; word < CPU_SETSIZE / 64; ++word) {
    uint64_t cpus = 0;
    for (int rank = 0; rank < segment.size(); ++rank) {
      cpus |= segment.state(rank).cpus[word].load(std::memory_order_relaxed);
    }
    allowed += std::popcount(cpus);
  }
  return std::min(allowed, quota);
}

std::atomic<bool> moreRanksThanCpus{false};

// This process's live groups that have more ranks than CPUs.
struct Groups {
  Mutex mutex;
  std::set<const RanksOnHost*> crowded GUARDED_BY(mutex);

  void inChild() REQUIRES(mutex) {
    crowded.clear();
    moreRanksThanCpus.store(false);
  }
};

void note(const RanksOnHost* group, bool crowded) {
  auto& groups = forkSafe<Groups>();
  LockGuard lock(groups.mutex);
  if (crowded) {
    groups.crowded.insert(group);
  } else {
    groups.crowded.erase(group);
  }
  moreRanksThanCpus.store(!groups.crowded.empty());
}

}  // namespace

bool crowded() {
  return moreRanksThanCpus.load(std::memory_order_relaxed);
}

RanksOnHost::RanksOnHost(Segment& segment, int rank) : segment_(segment) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) {  // the kernel has more CPUs than the set holds
    CPU_ZERO(&set);
    for (int cpu = 0; cpu < std::min(get_nprocs(), CPU_SETSIZE); ++cpu) CPU_SET(cpu, &set);
  }
  auto& cpus = segment.state(rank).cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) {
      cpus[cpu / 64].fetch_or(uint64_t{1} << cpu % 64, std::memory_order_relaxed);
    }
  }
  count();
}

void RanksOnHost::count() const {
  note(this, segment_.size() > cpuCount(segment_));
}

RanksOnHost::~RanksOnHost() {
  note(this, false);
}

uint16_t Waiter::noteCpu() const {
  const auto cpu = static_cast<uint16_t>(sched_getcpu() + 1);
  auto& noted = segment_.header().cpus[self_];
  if (noted.load(std::memory_order_relaxed) != cpu) noted.store(cpu, std::memory_order_relaxed);
  return cpu;
}

bool Waiter::sharesCpu() const {
  const uint16_t cpu = noteCpu();
  const auto& cpus = segment_.header().cpus;
  for (int rank = 0; rank < segment_.size(); ++rank) {
    if (rank != self_ && cpus[rank].load(std::memory_order_relaxed) == cpu) return true;
  }
  return false;
}

// Polls ready() without sleeping, for the spin time that adaptSpinTime() has set, and returns
// whether ready() became true. A wait for any rank always polls for kPatience and does not adapt
// the spin time, since its ready() may move much data.
bool Waiter::spinThenYield(
    FunctionRef<bool()> ready, FunctionRef<bool()> failed, int waker,
    Clock::time_point begin) const {
  const microseconds learned(patience_.load(std::memory_order_relaxed));
  const auto end = begin + (waker == kAnyone ? kPatience : learned);
  for (auto now = begin; now < end && !failed();) {
    if (crowded() || sharesCpu()) {
      if (ready()) return true;
      sched_yield();
    } else {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return true;
        pauseCpu();
      }
    }
    now = Clock::now();
  }
  return false;
}

// Sets the spin time of the next wait, which will probably last about as long as this one. `soon`
// is true if this wait ended within kPatience.
void Waiter::adaptSpinTime(int waker, bool soon) const {
  if (waker == kAnyone) return;
  const auto before = patience_.load(std::memory_order_relaxed);
  const auto after = soon ? kPatience.count() : std::max(before / 2, kLeastPatience.count());
  if (after != before) patience_.store(after, std::memory_order_relaxed);
}

void Waiter::sleepUnless(int waker, FunctionRef<bool()> ready) const {
  Doorbell& doorbell = segment_.state(self_).doorbell;
  struct Sleeper {
    Doorbell& doorbell;
    explicit Sleeper(Doorbell& doorbell) : doorbell(doorbell) { doorbell.sleepers.fetch_add(1); }
    ~Sleeper() { doorbell.sleepers.fetch_sub(1); }
  } sleeper(doorbell);
  const uint32_t rings = doorbell.rings.load(std::memory_order_acquire);
  if (waker != kAnyone) {
    segment_.await(self_, waker);
  } else {
    for (int rank = 0; rank < segment_.size(); ++rank) segment_.await(self_, rank);
  }
  // Pairs with the fence in Segment::wakeRank and wakeAll: either the waking rank sees the sleeper,
  // or the sleeper sees what was published.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!ready()) syscall(SYS_futex, &doorbell.rings, FUTEX_WAIT, rings, &kSleep, nullptr, 0);
}

void Waiter::checkPeers(FunctionRef<bool(int)> needs) const {
  const uint32_t ownPid = processId();
  for (int rank = 0; rank < segment_.size(); ++rank) {
    if (rank == self_ || !needs(rank)) continue;
    const RankState& state = segment_.state(rank);
    const uint32_t pid = state.pid.load(std::memory_order_acquire);
    if (pid == 0) continue;  // has not joined
    const std::string who = segment_.nameOf(rank);
    const Phase phase = state.phase.load(std::memory_order_acquire);
    if (phase == Phase::departed) {
      throw NcclError(ncclRemoteError, who + " destroyed its communicator", {rank});
    }
    if (phase == Phase::aborted) {
      throw NcclError(
          ncclRemoteError, who + " (pid " + std::to_string(pid) + ") aborted the communicator",
          {rank});
    }
    if (pid != ownPid && !processAlive(pid, state.startTime.load(std::memory_order_acquire))) {
      throw NcclError(ncclRemoteError, who + " (pid " + std::to_string(pid) + ") died", {rank});
    }
  }
}

void Waiter::waitLong(
    FunctionRef<bool()> ready, FunctionRef<bool(int)> needs, int waker, bool watchFailure) const {
  const auto failed = [&] { return watchFailure && segment_.failed(); };
  const auto begin = Clock::now();
  if (spinThenYield(ready, failed, waker, begin)) return adaptSpinTime(waker, true);
  const auto left = [&] {
    for (int rank = 0; rank < segment_.size(); ++rank) {
      if (rank != self_ && needs(rank) && segment_.hasLeft(rank)) return true;
    }
    return false;
  };
  auto nextLifeCheck = Clock::now() + kLifeCheck;
  for (;;) {
    const auto now = Clock::now();
    const bool lookForDead = now >= nextLifeCheck;
    if (lookForDead) nextLifeCheck = now + kLifeCheck;
    // A rank may have published what this rank waits for before it left or died, so check ready()
    // first.
    if (left() || lookForDead) {
      try {
        checkPeers(needs);
      } catch (const NcclError& failure) {
        if (ready()) {
          races::mark(races::Race::departedAfterItsPart);
          return;
        }
        if (!watchFailure) throw;
        segment_.fail(failure);
      }
    }
    if (ready()) return adaptSpinTime(waker, Clock::now() - begin <= kPatience);
    if (lookForDead && interrupted()) {
      throw interruption(self_);
    }
    if (failed()) throw segment_.failure();
    if (segment_.state(self_).phase.load(std::memory_order_acquire) == Phase::aborted) {
      throw NcclError(ncclInvalidUsage, "this rank has aborted the communicator");
    }
    sleepUnless(waker, [&] { return ready() || failed(); });
  }
}

}  // namespace torchcomms_pg::shm
