#include "shm/segment/Segment.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <new>

#include "base/FileDescriptor.hpp"
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
  std::map<std::array<uint64_t, 2>, std::weak_ptr<Segment>> segments GUARDED_BY(mutex);
};

Mappings& mappings() {
  return forkSafe<Mappings>();
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
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (page == MAP_FAILED) {
    throw NcclError(ncclSystemError, std::string("commInitRank: mmap: ") + std::strerror(errno));
  }
  auto& header = *static_cast<Header*>(page);
  int32_t agreed = 0;
  header.ranks.compare_exchange_strong(agreed, ranks);
  std::string text;
  if (agreed != 0 && agreed != ranks) {
    text = "commInitRank: ranks disagree on the number of ranks: " + std::to_string(agreed) +
           " and " + std::to_string(ranks);
    record(header, NcclError(ncclInvalidArgument, text));
  }
  munmap(page, kPage);
  if (!text.empty()) throw NcclError(ncclInvalidArgument, text);
}

}  // namespace

static_assert(sizeof(Header) <= kPage);

size_t Segment::channelBytes(int ranks) {
  constexpr size_t kOfOneRank = 512 << 10, kLeast = 8 << 10, kMost = 128 << 10;
  return std::clamp(kOfOneRank / static_cast<size_t>(ranks), kLeast, kMost) / kPage * kPage;
}

Segment::Segment(int file, int ranks) : ranks_(ranks), channelBytes_(channelBytes(ranks)) {
  const auto n = static_cast<size_t>(ranks);
  const size_t statesAt = kPage;
  const size_t stagingAt = statesAt + roundUp(n * sizeof(RankState), kPage);
  const size_t channelsAt = stagingAt + n * kDepth * kStagingBytes;
  const size_t signalsAt = channelsAt + n * n * channelBytes_;
  bytes_ = signalsAt + roundUp(n * n * kSignals * sizeof(*signals_), kPage);
  // Every rank sets the same size, so their order does not matter. The seal keeps every process
  // from taking pages away from the others.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (ftruncate(file, static_cast<off_t>(bytes_)) != 0 ||
      (fcntl(file, F_ADD_SEALS, kSeals) != 0 && (fcntl(file, F_GET_SEALS) & kSeals) != kSeals)) {
    throw NcclError(
        ncclSystemError, "commInitRank: shared memory of " + std::to_string(bytes_) +
                             " bytes: " + std::strerror(errno));
  }
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) {
    throw NcclError(
        ncclSystemError,
        "commInitRank: mapping " + std::to_string(bytes_) + " bytes: " + std::strerror(errno));
  }
  base_ = static_cast<std::byte*>(base);
  states_ = reinterpret_cast<RankState*>(base_ + statesAt);
  staging_ = base_ + stagingAt;
  channels_ = base_ + channelsAt;
  signals_ = reinterpret_cast<std::atomic<uint64_t>*>(base_ + signalsAt);
}

Segment::~Segment() {
  munmap(base_, bytes_);
}

std::shared_ptr<Segment> Segment::open(const ncclUniqueId& id, int ranks) {
  const IdContent content = decode(id);
  LockGuard lock(mappings().mutex);
  std::erase_if(mappings().segments, [](const auto& entry) { return entry.second.expired(); });
  auto& known = mappings().segments[{content.token[0], content.token[1]}];
  if (auto segment = known.lock(); segment && segment->size() == ranks) return segment;
  const FileDescriptor file{openUniqueId(id)};
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
