#include "operation/IssueCounts.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/Thread.hpp"

namespace torchcomms_pg {

void IssueCounts::number(Operation& op, bool messages, size_t count) {
  // Messages are numbered separately: ranks that exchange none must still agree on the number of
  // collectives.
  op.seq = (messages ? messages_ : collectives_).fetch_add(count, std::memory_order_relaxed) + 1;
  op.collective = !messages;
  if (!messages) {
    collectivesThread_.store(threadNumber(), std::memory_order_relaxed);
  }
  if (isPointToPoint(op.kind)) {
    op.number = next(op.kind, op.peer);
  }
}

void IssueCounts::number(PreparedOp& call) {
  auto& op = call.op;
  const auto& parts = call.members ? *call.members : call.parts;
  number(
      op, isPointToPoint(op.kind) || !call.parts.empty(), std::max<size_t>(call.parts.size(), 1));
  if (parts.empty()) {
    return;
  }
  auto numbered = std::make_shared<std::vector<NumberedMessage>>();
  for (const auto& part : parts) {
    if (isPointToPoint(part.op.kind)) {
      numbered->push_back({part.op.kind, part.op.peer, next(part.op.kind, part.op.peer)});
    }
  }
  op.messages = std::move(numbered);
}

void IssueCounts::takeBack(const Operation& op) {
  const auto unlessLater = [](Count& count, uint64_t number) {
    count.compare_exchange_strong(number, number - 1, std::memory_order_relaxed);
  };
  unlessLater(op.collective ? collectives_ : messages_, op.seq);
  if (auto* const count = op.collective ? nullptr : countOf(op.kind, op.peer)) {
    unlessLater(*count, op.number);
  }
}

// Returns null for a put, for which no rank waits. Call only for point-to-point operations.
IssueCounts::Count* IssueCounts::countOf(OpKind kind, int peer) {
  if (peer < 0) {
    return &receivedFromAny_;
  }
  switch (kind) {
    case OpKind::send: return &withPeer(kSent, peer);
    case OpKind::recv: return &withPeer(kReceived, peer);
    case OpKind::signal: return &withPeer(kSignalled, peer);
    case OpKind::waitSignal: return &withPeer(kAwaited, peer);
    default: return nullptr;
  }
}

uint64_t IssueCounts::next(OpKind kind, int peer) {
  const bool receives = kind == OpKind::recv || kind == OpKind::waitSignal;
  (receives ? receivesThread_ : sendsThread_).store(threadNumber(), std::memory_order_relaxed);
  auto* const count = countOf(kind, peer);
  return count == nullptr ? 0 : count->fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace torchcomms_pg
