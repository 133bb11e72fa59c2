// Layout of the shared memory of a communicator. Freshly mapped memory is zero, and zero is every
// field's initial value.
#pragma once

#include <nccl.h>
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {

inline constexpr int kMaxRanks = 1024;
inline constexpr size_t kLine = 64;

// Number of signal counters for each ordered pair of ranks.
inline constexpr int kSignals = 128;

// Number of staging buffers per rank: a rank fills one while its peers read the other.
inline constexpr int kDepth = 2;

// Size of one staging buffer in bytes. Data that does not fit into the writer's L2 cache is in the
// L3, from which peers read faster. Measured with an L2 of 1 MiB and two ranks: with 512 KiB, an
// all-reduce of 1 to 16 MB takes 1.4 to 1.8 times as long. With 2 MiB, an all-reduce of 16 to 64 MB
// takes 1.1 times as long.
inline constexpr size_t kStagingBytes = 1 << 20;

// Number of steps whose signatures stay readable. When a rank opens step s, it compares the
// signatures of step s - kDepth. By then a peer may have published step s + 1, so kDepth + 2
// signatures must coexist.
inline constexpr int kHistory = kDepth + 2;

enum class Phase : uint32_t { absent, joined, departed, aborted };

// A rank's progress through the steps of the communicator's collectives.
struct alignas(kLine) Progress {
  std::atomic<uint64_t> arrived;   // number of steps that this rank has published
  std::atomic<uint64_t> departed;  // number of steps that this rank has closed
  Signature signatures[kHistory];
};
static_assert(sizeof(Progress) == kLine);

// A rank's threads sleep on the futex `rings`; `sleepers` is their number. Ranks that sleep until
// this rank does something set their bits in `awaitedBy`, and this rank clears a bit when it wakes
// that rank. See Wait.hpp.
struct alignas(kLine) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;
  alignas(kLine) std::atomic<uint64_t> awaitedBy[kMaxRanks / 64];
};

// Id of the communicator that a shrink makes, written by the lowest surviving rank.
struct alignas(kLine) ShrinkOffer {
  std::atomic<uint32_t> generation;  // odd while the offer is being written
  std::atomic<uint64_t> excluded;    // identifies the shrink: hash of the surviving ranks
  static constexpr size_t kWords = sizeof(ncclUniqueId) / sizeof(uint64_t);
  std::atomic<uint64_t> id[kWords];
};

struct alignas(kLine) RankState {
  std::atomic<uint32_t> pid;  // process that has claimed this rank, or 0
  std::atomic<Phase> phase;
  std::atomic<uint64_t> startTime;  // of process `pid`, see host/Process.hpp
  std::atomic<uint64_t>
      cpus[CPU_SETSIZE / 64];  // CPUs on which the joining thread may run, one bit each
  Progress progress;
  Doorbell doorbell;
  ShrinkOffer offer;
};

// Whether the communicator's first failure has been recorded.
enum class Recorded : uint32_t { no, begun, yes };

// Limit of the bytes of host::encode() for the first failure.
inline constexpr size_t kFailureBytes = 1023;

struct alignas(kLine) Header {
  uint64_t magic;
  uint64_t token[2];
  std::atomic<int32_t> ranks;
  alignas(kLine) std::atomic<int32_t> joined;
  alignas(kLine) std::atomic<Recorded> failed;
  char failure[kFailureBytes + 1];
  alignas(kLine) std::atomic<uint64_t> doorbell;  // counter of Library::ring
  // By rank: number, from 1, of the CPU that Waiter::noteCpu() has stored last, or 0 if it has
  // stored none.
  alignas(kLine) std::atomic<uint16_t> cpus[kMaxRanks];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "the atomics are shared by processes");

// Hash of the layout, which differs between builds with different layouts.
inline constexpr uint64_t kLayout = [] {
  uint64_t hash = 0;
  for (const size_t number :
       {sizeof(Header), offsetof(Header, ranks), offsetof(Header, joined), offsetof(Header, failed),
        offsetof(Header, failure), offsetof(Header, doorbell), offsetof(Header, cpus),
        sizeof(RankState), offsetof(RankState, progress), offsetof(RankState, doorbell),
        offsetof(RankState, offer), sizeof(Progress), sizeof(Doorbell), sizeof(ShrinkOffer),
        kStagingBytes, static_cast<size_t>(kSignals), static_cast<size_t>(kDepth),
        static_cast<size_t>(kHistory), static_cast<size_t>(kMaxRanks)}) {
    hash = (hash ^ number) * 1099511628211u;  // as in host::hashBytes
  }
  return hash;
}();

}  // namespace torchcomms_pg::shm
