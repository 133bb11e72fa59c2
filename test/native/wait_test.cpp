// Waits of ranks for each other.
#include <sched.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "Messages.hpp"
#include "host/Limits.hpp"
#include "shm/segment/Wait.hpp"

using namespace test;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Delay of the late rank, and the limit for the others: a rank that sleeps and is not woken looks
// again after 100 ms.
constexpr milliseconds kLate{20}, kUnwoken{80};
constexpr int kRounds = 6;

void addUp(ncclComm_t comm) {
  float value = 1;
  CHECK_NCCL(nccl().allReduce(&value, &value, 1, ncclFloat32, ncclSum, comm, nullptr));
  CHECK_EQUAL(value, static_cast<float>(sizeOf(comm)));
}

// Checks the least time of several rounds in which the others wait for `late`: a busy machine
// delays some of them.
void wakesTheOthers(ncclComm_t comm, int rank, int late, const std::function<void()>& meet) {
  auto least = Clock::duration::max();
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = Clock::now();
    addUp(comm);
    if (rank == late) std::this_thread::sleep_for(kLate);
    meet();
    least = std::min(least, Clock::now() - begin);
  }
  CHECK(least < kUnwoken);
}

thread_local int pinnings = 0;  // number of times that this thread's CPUs were set

double cpuSeconds() {
  timespec used;
  CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) == 0);
  return static_cast<double>(used.tv_sec) + used.tv_nsec * 1e-9;
}

}  // namespace

// Replaces the C library's, for all of this program.
extern "C" __attribute__((visibility("default"))) int sched_setaffinity(
    pid_t thread, size_t bytes, const cpu_set_t* cpus) noexcept {
  ++pinnings;
  return static_cast<int>(syscall(SYS_sched_setaffinity, thread, bytes, cpus));
}

TEST(aRankThatArrivesWakesThoseThatSleepInACollective) {
  for (int late = 0; late < 3; ++late) {
    threadRanks(3, [late](ncclComm_t comm, int rank) {
      wakesTheOthers(comm, rank, late, [&] { addUp(comm); });
    });
  }
}

TEST(aMessageWakesItsReceiver) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    wakesTheOthers(comm, rank, 0, [&] {
      float value = 1;
      if (rank == 0) {
        CHECK_NCCL(nccl().send(&value, 1, ncclFloat32, 1, comm, nullptr));
      } else {
        CHECK_NCCL(nccl().recv(&value, 1, ncclFloat32, 0, comm, nullptr));
      }
    });
  });
}

// A rank that spun would use up to 100 us of each step, while the one it waits for cannot run: 36
// us in the mean, where 1.2 us are wanted. With a sanitizer the calls themselves take 16 us.
TEST(ranksOfOneCpuDoNotSpinForEachOther) {
  threadRanks(2, [](ncclComm_t comm, int) {
    constexpr int kSteps = 2000;
    addUp(comm);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) return;  // not ours to use
    addUp(comm);
    const double before = cpuSeconds();
    for (int step = 0; step < kSteps; ++step) addUp(comm);
    const double each = (cpuSeconds() - before) / kSteps;
    CHECK(each > 0 && (test::kSlow || each < 20e-6));
  });
}

TEST(aWaitLeavesTheCpusOfAThreadAlone) {
  threadRanks(2, [](ncclComm_t comm, int) {
    addUp(comm);
    cpu_set_t allowed;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) return;  // not ours to use
    addUp(comm);
    CHECK(sched_setaffinity(0, sizeof allowed, &allowed) == 0);
    pinnings = 0;
    for (int step = 0; step < 3000; ++step) addUp(comm);
    CHECK_EQUAL(pinnings, 0);
  });
}

// Has ranks join one after the other, each while its thread may use only the CPU of its number in
// `cpus`, and calls body(). Calls nothing if these CPUs are not this process's to use.
void pinnedRanks(const std::vector<int>& cpus, const std::function<void()>& body) {
  const ncclUniqueId id = uniqueId();
  const auto ranks = static_cast<int>(cpus.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  // Another thread, since the CPUs of this one are to stay as they are.
  std::thread([&] {
    std::vector<ncclComm_t> comms;
    bool pinned = true;
    for (int rank = 0; rank < ranks && pinned; ++rank) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpus[rank], &one);
      pinned = sched_setaffinity(0, sizeof one, &one) == 0;
      const ncclResult_t wanted = rank == ranks - 1 ? ncclSuccess : ncclInProgress;
      comms.push_back(nullptr);
      CHECK_EQUAL(nccl().commInitRankConfig(&comms.back(), ranks, id, rank, &config), wanted);
    }
    for (const ncclComm_t comm : comms) {
      ncclResult_t state = ncclSuccess;
      CHECK_NCCL(nccl().commGetAsyncError(comm, &state));  // the rank learns that all have joined
    }
    if (pinned) body();
    for (const ncclComm_t comm : comms) CHECK_NCCL(nccl().commAbort(comm));
  }).join();
}

TEST(ranksThatArePinnedToACpuEachDoNotYieldToEachOther) {
  using torchcomms_pg::shm::crowded;
  const bool quota = torchcomms_pg::host::cpuQuota() < 2;
  pinnedRanks({0, 1}, [&] { CHECK_EQUAL(crowded(), quota); });
}

TEST(ranksThatArePinnedToOneCpuYieldToEachOther) {
  using torchcomms_pg::shm::crowded;
  pinnedRanks({0, 0}, [] { CHECK(crowded()); });
}

TEST(aGroupThatHasEndedIsNotCountedAmongTheRanksOfThisHost) {
  using torchcomms_pg::shm::crowded;
  CHECK(!crowded());
  threadRanks(get_nprocs() + 1, [](ncclComm_t comm, int) {
    addUp(comm);
    CHECK(crowded());
    addUp(comm);
  });
  CHECK(!crowded());
}
