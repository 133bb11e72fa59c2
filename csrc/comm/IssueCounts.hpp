// Numbers the operations of a communicator as it issues them. Other ranks learn from these numbers
// which operations this rank has issued, see diagnosis/rank/RankStatus.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "diagnosis/rank/RankStatus.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

// Thread-safe.
class IssueCounts {
 public:
  explicit IssueCounts(int size)
      : size_(size), withPeers_(std::make_unique<Count[]>(static_cast<size_t>(size) * kKinds)) {}

  // Sets the operation's number in the group's order, and its messages' numbers among the messages
  // with each peer.
  void number(PreparedOp& call);
  // Does the same for an operation that is not a batch.
  void number(Operation& op);
  // Takes back the numbers of `op`, which was refused. Keeps a number if another thread has
  // numbered a later operation: two operations must not have one number.
  void takeBack(const Operation& op);

  uint64_t collectives() const { return collectives_.load(std::memory_order_relaxed); }
  // Returns the counts, in which global ranks identify the peers.
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
  Count collectivesThread_{0};  // the threads that have issued the latest ones
  Count sendsThread_{0};
  Count receivesThread_{0};
  const std::unique_ptr<Count[]> withPeers_;
};

}  // namespace torchcomms_pg
