// Numbers the operations of a communicator as it issues them. Other ranks may learn from these
// numbers which operations this rank has issued.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

// Thread-safe.
class IssueCounts {
 public:
  explicit IssueCounts(int size)
      : withPeers_(std::make_unique<Count[]>(static_cast<size_t>(size) * kKinds)) {}

  // Sets the operation's number in the group's order, and its messages' numbers among the messages
  // with each peer.
  void number(PreparedOp& call);
  // Does the same for an operation that is not a batch.
  void number(Operation& op) { number(op, isPointToPoint(op.kind), 1); }
  // Takes back the numbers of `op`, which was refused. Keeps a number if another thread has
  // numbered a later operation: two operations must not have one number.
  void takeBack(const Operation& op);

  // Return the numbers of operations that have been issued.
  uint64_t collectives() const { return get(collectives_); }
  uint64_t receivedFromAny() const { return get(receivedFromAny_); }
  uint64_t sent(int peer) const { return get(withPeer(kSent, peer)); }
  uint64_t received(int peer) const { return get(withPeer(kReceived, peer)); }
  uint64_t signalled(int peer) const { return get(withPeer(kSignalled, peer)); }
  // Return the threads that have issued the latest ones, by threadNumber(), or 0.
  uint64_t collectivesThread() const { return get(collectivesThread_); }
  uint64_t sendsThread() const { return get(sendsThread_); }
  uint64_t receivesThread() const { return get(receivesThread_); }

 private:
  using Count = std::atomic<uint64_t>;
  enum Kind { kSent, kReceived, kSignalled, kAwaited, kKinds };

  static uint64_t get(const Count& count) { return count.load(std::memory_order_relaxed); }
  // Does what number() does for `count` operations, but for the messages of a batch.
  void number(Operation& op, bool messages, size_t count);
  Count* countOf(OpKind kind, int peer);
  uint64_t next(OpKind kind, int peer);
  Count& withPeer(Kind kind, int peer) const { return withPeers_[peer * kKinds + kind]; }

  Count collectives_{0};
  Count messages_{0};
  Count receivedFromAny_{0};
  Count collectivesThread_{0};
  Count sendsThread_{0};
  Count receivesThread_{0};
  const std::unique_ptr<Count[]> withPeers_;
};

}  // namespace torchcomms_pg
