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

// Owns a mapping of the memory that a unique id names. Ranks in one process share one Segment. All
// functions may be called from any thread. None blocks, except failure() for at most 0.1 s.
//
// Layout: Header, RankState per rank, kDepth staging buffers per rank, one channel per ordered pair
// of ranks, kSignals counters per ordered pair. A page takes memory once a process has touched it.
class Segment {
 public:
  // Opens the memory of `id`. Throws NcclError if `id` does not name memory for `ranks` ranks that
  // this process can reach.
  static std::shared_ptr<Segment> open(const ncclUniqueId& id, int ranks);

  int size() const { return ranks_; }

  // Sets the names that error texts give to the ranks, if these are part of a larger group. Call
  // before the first operation; all ranks of a process set the same names.
  void nameRanks(std::vector<std::string> names) {
    names_.store(std::make_shared<const std::vector<std::string>>(std::move(names)));
  }
  // Returns the rank's name, by default "rank " and its number.
  std::string nameOf(int rank) const {
    const auto names = names_.load();
    return names == nullptr ? "rank " + std::to_string(rank) : (*names)[rank];
  }
  Header& header() const { return *reinterpret_cast<Header*>(memory_.get()); }
  RankState& state(int rank) const { return states_[rank]; }
  // Returns whether the rank has left the communicator.
  bool hasLeft(int rank) const {
    return state(rank).phase.load(std::memory_order_acquire) > Phase::joined;
  }

  // Returns the ranks, ascending, for which match(rank) is true.
  template <class Match>
  std::vector<int> ranksWhere(const Match& match) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (match(rank)) ranks.push_back(rank);
    }
    return ranks;
  }

  std::byte* staging(int rank, uint64_t step) const {
    return staging_ + (static_cast<size_t>(rank) * kDepth + step % kDepth) * kStagingBytes;
  }

  // channel() returns the memory, of channelBytes() bytes, for messages from `source` to
  // `destination`, which may be the same rank. It is aligned to a page, and zero at first.
  size_t channelBytes() const { return channelBytes_; }
  std::byte* channel(int source, int destination) const {
    return channels_ + (static_cast<size_t>(source) * ranks_ + destination) * channelBytes_;
  }

  // Returns the counter of the signals `index` that `source` has sent to `destination`.
  std::atomic<uint64_t>& signal(int source, int destination, int index) const {
    return signals_[(static_cast<size_t>(destination) * kSignals + index) * ranks_ + source];
  }

  // Declares the communicator failed on every rank and wakes all threads. Returns false, and keeps
  // the earlier failure, if the communicator has failed before.
  bool fail(const NcclError& failure);
  bool failed() const { return header().failed.load(std::memory_order_acquire) != Recorded::no; }
  NcclError failure() const;  // the first failure; call only if failed() is true

  // Wake the threads of `rank`, or of all ranks, that sleep until rank `self` has done something.
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
    auto& awaitedBy = state(rank).doorbell.awaitedBy[self / 64];
    const uint64_t bit = uint64_t{1} << (self % 64);
    if ((awaitedBy.load(std::memory_order_relaxed) & bit) == 0) awaitedBy.fetch_or(bit);
  }

 private:
  Segment(int file, int ranks);
  void wake(int rank) const;
  void wakeThose(int self, int word, uint64_t mask) const {
    auto& awaitedBy = state(self).doorbell.awaitedBy[word];
    if ((awaitedBy.load(std::memory_order_relaxed) & mask) != 0)
      wakeAwaiting(awaitedBy, word, mask);
  }
  void wakeAwaiting(std::atomic<uint64_t>& awaitedBy, int word, uint64_t mask) const;

  int ranks_;
  size_t channelBytes_;
  std::shared_ptr<std::byte> memory_;
  RankState* states_;
  std::byte* staging_;
  std::byte* channels_;
  std::atomic<uint64_t>* signals_;
  AtomicShared<const std::vector<std::string>> names_;  // null unless nameRanks() was called
};

}  // namespace torchcomms_pg::shm
