// The shared memory of one communicator.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/AtomicShared.hpp"
#include "shm/Host.hpp"
#include "shm/segment/Layout.hpp"
#include "shm/segment/UniqueId.hpp"

namespace torchcomms_pg::shm {

// Owns a mapping of the memory that a unique id names. Ranks in one process
// share one Segment. All functions may be called from any thread, and none of
// them blocks.
//
// Layout: Header, RankState per rank, kDepth staging buffers per rank, one
// channel per ordered pair of ranks, kSignals counters per ordered pair. Pages
// cost memory once they are touched.
class Segment {
 public:
  // Opens the memory of `id`. Throws NcclError if `id` does not lead to memory for `ranks` ranks.
  static std::shared_ptr<Segment> open(const ncclUniqueId& id, int ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int size() const { return ranks_; }

  // Sets the names of the ranks in errors, if they are part of a larger group. Call before the
  // first operation; all ranks of a process set the same names.
  void nameRanks(std::vector<std::string> names) {
    names_.store(std::make_shared<const std::vector<std::string>>(std::move(names)));
  }
  // Returns the rank's name, "rank 1" by default.
  std::string nameOf(int rank) const {
    const auto names = names_.load();
    return names == nullptr ? "rank " + std::to_string(rank) : (*names)[rank];
  }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankState& state(int rank) const { return states_[rank]; }

  std::byte* staging(int rank, uint64_t step) const {
    return staging_ + (static_cast<size_t>(rank) * kDepth + step % kDepth) * kStagingBytes;
  }

  // Returns the memory for messages from `source` to `destination`, which may be the same rank. It
  // is aligned to a page, and zero at first.
  size_t channelBytes() const { return channelBytes_; }
  std::byte* channel(int source, int destination) const {
    return channels_ + (static_cast<size_t>(source) * ranks_ + destination) * channelBytes_;
  }

  // Returns the counter of how often `source` has sent the signal `index` to `destination`.
  std::atomic<uint64_t>& signal(int source, int destination, int index) const {
    return signals_[(static_cast<size_t>(destination) * kSignals + index) * ranks_ + source];
  }

  // Declares the communicator failed on every rank and wakes all threads. Only the first failure
  // counts; returns whether it was this one.
  bool fail(const NcclError& failure);
  bool failed() const { return header().failed.load(std::memory_order_acquire) != Recorded::no; }
  NcclError failure() const;  // recorded by fail(); call only once failed()

  // Wakes the threads of `rank`, or of all ranks, that sleep until rank `self` has done something.
  // Call after publishing what they wait for. Cheap when no thread sleeps.
  void wakeRank(int self, int rank) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    wakeThose(self, rank / 64, uint64_t{1} << (rank % 64));
  }
  void wakeAll(int self) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (int word = 0; word * 64 < ranks_; ++word) wakeThose(self, word, ~uint64_t{0});
  }

  // Registers a thread of rank `self` that is about to sleep until `rank` wakes it.
  void await(int self, int rank) const {
    auto& sleepers = state(rank).doorbell.awaitedBy[self / 64];
    const uint64_t bit = uint64_t{1} << (self % 64);
    if ((sleepers.load(std::memory_order_relaxed) & bit) == 0) sleepers.fetch_or(bit);
  }

  static size_t channelBytes(int ranks);

 private:
  Segment(int file, int ranks);
  void wake(int rank) const;
  void wakeThose(int self, int word, uint64_t mask) const {
    auto& sleepers = state(self).doorbell.awaitedBy[word];
    if ((sleepers.load(std::memory_order_relaxed) & mask) != 0) wakeAwaiting(sleepers, word, mask);
  }
  void wakeAwaiting(std::atomic<uint64_t>& sleepers, int word, uint64_t mask) const;

  int ranks_;
  size_t channelBytes_;
  size_t bytes_;
  std::byte* base_;
  RankState* states_;
  std::byte* staging_;
  std::byte* channels_;
  std::atomic<uint64_t>* signals_;
  AtomicShared<const std::vector<std::string>> names_;  // set by each rank of the process
};

}  // namespace torchcomms_pg::shm
