// Numbers the operations of a communicator as it issues them. The numbers tell other ranks what
// this one has done, see monitor/RankStatus.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "monitor/RankStatus.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

// Thread-safe.
class IssueCounts {
 public:
  explicit IssueCounts(int size)
      : size_(size), withPeers_(std::make_unique<Count[]>(static_cast<size_t>(size) * kKinds)) {}

  // Sets the place of the operation in the group's order, and of its messages among those of a
  // peer.
  void number(PreparedOp& call);
  // Does the same for an operation that is no batch.
  void number(Operation& op);
  // Forgets an operation that was numbered last, and has been refused.
  void takeBack(const Operation& op);

  uint64_t collectives() const { return collectives_.load(std::memory_order_relaxed); }
  // Returns the counts, with peers by their numbers in the job.
  GroupCounts all(uint64_t group, const std::vector<int64_t>& globalRanks) const;

 private:
  using Count = std::atomic<uint64_t>;
  enum Kind { kSent, kReceived, kSignalled, kAwaited, kKinds };

  Count* countOf(OpKind kind, int peer);
  uint64_t next(OpKind kind, int peer);
  Count& withPeer(Kind kind, int peer) const { return withPeers_[peer * kKinds + kind]; }

  const int size_;
  Count collectives_{0};
  Count messages_{0};
  Count receivedFromAny_{0};
  const std::unique_ptr<Count[]> withPeers_;
};

}  // namespace torchcomms_pg
