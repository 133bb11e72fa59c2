#include "shm/segment/Wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Spin time after long waits: more would only take the CPU from a thread that could use it, such as
// the one that computes what this rank sends next.
constexpr microseconds kLeastPatience{5};

// Number of consecutive looks that must find a CPU shared: about a millisecond of them.
constexpr int kSharedLooks = 200;

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

bool crowded() {
  return ranksOnHost.load(std::memory_order_relaxed) > cpuCount();
}

// Returns the number of the current CPU as Header::cpus holds it.
uint16_t currentCpu() {
  return static_cast<uint16_t>(sched_getcpu() + 1);
}

// Moves the calling thread to one of its CPUs that are not `taken`, if it has
// one, and then allows it all of them again.
void moveFrom(const cpu_set_t& taken) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t both;
  cpu_set_t free;
  CPU_AND(&both, &allowed, &taken);
  CPU_XOR(&free, &allowed, &both);
  if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace

void noteRanksOnHost(int ranks) {
  int known = ranksOnHost.load(std::memory_order_relaxed);
  while (known < ranks && !ranksOnHost.compare_exchange_weak(known, ranks)) {
  }
}

void Waiter::noteCpu() const {
  const uint16_t cpu = currentCpu();
  auto& noted = segment_.header().cpus[self_];
  if (noted.load(std::memory_order_relaxed) != cpu) noted.store(cpu, std::memory_order_relaxed);
}

bool Waiter::sharesCpu() const {
  noteCpu();
  const uint16_t cpu = currentCpu();
  const auto& cpus = segment_.header().cpus;
  for (int rank = 0; rank < segment_.size(); ++rank) {
    if (rank != self_ && cpus[rank].load(std::memory_order_relaxed) == cpu) return true;
  }
  return false;
}

// Moves the calling thread, unless its rank is the first of those that share its CPU, to a free
// CPU. The scheduler leaves them together: threads that hand a CPU to each other all the time look
// too busy with its caches to be moved.
void Waiter::migrateToFreeCpu() const {
  if (shared_.fetch_add(1, std::memory_order_relaxed) + 1 < kSharedLooks) return;
  shared_.store(0, std::memory_order_relaxed);
  const auto& cpus = segment_.header().cpus;
  const uint16_t own = currentCpu();
  cpu_set_t taken;
  CPU_ZERO(&taken);
  bool first = true;
  for (int rank = 0; rank < segment_.size(); ++rank) {
    const uint16_t cpu = cpus[rank].load(std::memory_order_relaxed);
    if (rank == self_ || cpu == 0) continue;
    CPU_SET(cpu - 1, &taken);
    first &= cpu != own || rank > self_;
  }
  if (first) return;
  moveFrom(taken);
  noteCpu();
}

// Looks without sleeping for as long as that has paid of late. A wait for more than one step of one
// peer is not judged: it may move much meanwhile.
bool Waiter::spinThenYield(
    FunctionRef<bool()> ready,
    FunctionRef<bool()> failed,
    int waker,
    Clock::time_point begin) const {
  const microseconds learned(patience_.load(std::memory_order_relaxed));
  const auto end = begin + (waker == kAnyone ? kPatience : learned);
  for (auto now = begin; now < end && !failed();) {
    if (crowded() || sharesCpu()) {
      if (ready()) return true;
      if (!crowded()) migrateToFreeCpu();
      sched_yield();
    } else {
      if (shared_.load(std::memory_order_relaxed) != 0) shared_.store(0);
      for (int i = 0; i < 32; ++i) {
        if (ready()) return true;
        pauseCpu();
      }
    }
    now = Clock::now();
  }
  return false;
}

// Expects the next wait to last about as long as this one did.
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
  // Pairs with the fence in Segment::wakeRank: either the ringing rank sees the sleeper, or the
  // sleeper sees what was published.
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
          ncclRemoteError,
          who + " (pid " + std::to_string(pid) + ") aborted the communicator",
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
    // A rank that has left or died may have done before what this rank waits for.
    if (left() || lookForDead) {
      try {
        checkPeers(needs);
      } catch (const NcclError& failure) {
        if (ready()) return;
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
