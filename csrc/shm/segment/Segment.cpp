#include "shm/segment/Segment.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <new>

#include "base/Mutex.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

constexpr size_t kPage = 4096;

constexpr size_t roundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// This process's mappings, by the token of the unique id.
struct Mappings {
  Mutex mutex;
  std::map<Token, std::weak_ptr<Segment>> segments GUARDED_BY(mutex);
};

Mappings& mappings() {
  return forkSafe<Mappings>();
}

size_t bytesOfChannel(int ranks) {
  constexpr size_t kOfOneRank = 512 << 10, kLeast = 8 << 10, kMost = 128 << 10;
  return std::clamp(kOfOneRank / static_cast<size_t>(ranks), kLeast, kMost) / kPage * kPage;
}

// Records the failure and returns true, or returns false if an earlier failure is recorded. Leaves
// out the ranks if there is no memory to encode them.
bool record(Header& header, const NcclError& failure) {
  std::string text;
  try {
    text = host::encode(failure, kFailureBytes);
  } catch (const std::bad_alloc&) {
  }
  auto none = Recorded::no;
  if (!header.failed.compare_exchange_strong(none, Recorded::begun)) return false;
  if (!text.empty()) {
    std::memcpy(header.failure, text.c_str(), text.size() + 1);
  } else {
    const auto reason = host::wholeCharacters(failure.what(), kFailureBytes - 12);
    std::snprintf(
        header.failure, sizeof header.failure, "%d\n%.*s", failure.result, static_cast<int>(reason),
        failure.what());
  }
  header.failed.store(Recorded::yes, std::memory_order_release);
  return true;
}

// Checks that all ranks pass the same number of ranks, on which the size of the memory depends. If
// not, records the failure and throws it.
void agreeOnRanks(int file, int ranks) {
  const auto page = mapFile(file, kPage, "commInitRank: mmap");
  auto& header = *reinterpret_cast<Header*>(page.get());
  int32_t agreed = 0;
  header.ranks.compare_exchange_strong(agreed, ranks);
  if (agreed == 0 || agreed == ranks) return;
  const NcclError failure(
      ncclInvalidArgument, "commInitRank: ranks disagree on the number of ranks: " +
                               std::to_string(agreed) + " and " + std::to_string(ranks));
  record(header, failure);
  throw failure;
}

}  // namespace

static_assert(sizeof(Header) <= kPage);

Segment::Segment(int file, int ranks) : ranks_(ranks), channelBytes_(bytesOfChannel(ranks)) {
  const auto n = static_cast<size_t>(ranks);
  const size_t statesAt = kPage;
  const size_t stagingAt = statesAt + roundUp(n * sizeof(RankState), kPage);
  const size_t channelsAt = stagingAt + n * kDepth * kStagingBytes;
  const size_t signalsAt = channelsAt + n * n * channelBytes_;
  const size_t bytes = signalsAt + roundUp(n * n * kSignals * sizeof(*signals_), kPage);
  const auto size = std::to_string(bytes) + " bytes";
  // Every rank sets the same size, so their order does not matter.
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0 || !sealSize(file)) {
    throw systemFailure("commInitRank: shared memory of " + size);
  }
  memory_ = mapFile(file, bytes, "commInitRank: mapping " + size);
  states_ = reinterpret_cast<RankState*>(memory_.get() + statesAt);
  staging_ = memory_.get() + stagingAt;
  channels_ = memory_.get() + channelsAt;
  signals_ = reinterpret_cast<std::atomic<uint64_t>*>(memory_.get() + signalsAt);
}

std::shared_ptr<Segment> Segment::open(const ncclUniqueId& id, int ranks) {
  const IdContent content = decode(id);
  LockGuard lock(mappings().mutex);
  std::erase_if(mappings().segments, [](const auto& entry) { return entry.second.expired(); });
  auto& known = mappings().segments[content.token];
  if (auto segment = known.lock(); segment && segment->size() == ranks) return segment;
  const FileDescriptor file = openMemory(content);
  agreeOnRanks(file.get(), ranks);
  const std::shared_ptr<Segment> segment(new Segment(file.get(), ranks));
  known = segment;
  return segment;
}

bool Segment::fail(const NcclError& failure) {
  if (!record(header(), failure)) return false;
  for (int rank = 0; rank < ranks_; ++rank) wake(rank);
  return true;
}

NcclError Segment::failure() const {
  const auto written = [this] {
    return header().failed.load(std::memory_order_acquire) == Recorded::yes;
  };
  // The rank that has begun to record the failure will soon finish, unless it was killed.
  for (int i = 0; i < 100 && !written(); ++i) {
    const timespec millisecond{0, 1'000'000};
    nanosleep(&millisecond, nullptr);
  }
  const auto failure = written() ? host::decode(header().failure) : std::nullopt;
  if (!failure) return {ncclRemoteError, "a rank died while it reported a failure"};
  auto ranks = failure->ranks;
  // A damaged record may name ranks that do not exist.
  std::erase_if(ranks, [this](int rank) { return rank < 0 || rank >= ranks_; });
  return {failure->result, failure->what(), std::move(ranks)};
}

void Segment::wakeAwaiting(std::atomic<uint64_t>& awaitedBy, int word, uint64_t mask) const {
  const uint64_t awaiting = awaitedBy.load(std::memory_order_relaxed) & mask;
  for (uint64_t bits = awaiting; bits != 0; bits &= bits - 1) {
    const int rank = word * 64 + std::countr_zero(bits);
    // A rank whose condition has become true does not sleep, and needs no wake-up.
    if (state(rank).doorbell.sleepers.load(std::memory_order_relaxed) == 0) continue;
    awaitedBy.fetch_and(~(bits & -bits));
    wake(rank);
  }
}

void Segment::wake(int rank) const {
  auto& rings = state(rank).doorbell.rings;
  rings.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace torchcomms_pg::shm
