#include "shm/collective/Exchange.hpp"

#include <algorithm>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {

std::byte* Exchange::open() {
  const uint64_t step = opened_++;
  if (step >= kDepth) {
    const uint64_t reused = step - kDepth;
    for (int peer = 0; peer < segment_.size(); ++peer) {
      if (peer == self_) continue;
      const auto& departed = segment_.state(peer).progress.departed;
      waiter_.waitForPeer(peer, [&] { return departed.load(std::memory_order_acquire) > reused; });
      check(peer, reused);
    }
  }
  return segment_.staging(self_, step);
}

bool Exchange::hasRoom() const {
  for (int peer = 0; opened_ >= kDepth && peer < segment_.size(); ++peer) {
    const auto& departed = segment_.state(peer).progress.departed;
    if (peer != self_ && departed.load(std::memory_order_acquire) <= opened_ - kDepth) return false;
  }
  return true;
}

void Exchange::publish() {
  Progress& mine = segment_.state(self_).progress;
  mine.signatures[published_ % kHistory] = signature_;
  mine.arrived.store(++published_, std::memory_order_release);
  waiter_.noteCpu();
  segment_.wakeAll(self_);
  // Follows the fence in wakeAll(): of two ranks that publish, at least one sees the other's step.
  if (rooted_) checkArrived(published_ - 1);
}

void Exchange::checkArrived(uint64_t step) {
  for (int peer = 0; peer < segment_.size(); ++peer) {
    // A peer is at most kDepth steps ahead of this rank, so the signatures of this rank's last
    // kDepth steps are still readable.
    const auto& arrived = segment_.state(peer).progress.arrived;
    if (arrived.load(std::memory_order_acquire) > step) check(peer, step);
  }
}

const std::byte* Exchange::read(int peer) {
  const uint64_t step = closed_.load(std::memory_order_relaxed);
  const auto& arrived = segment_.state(peer).progress.arrived;
  waiter_.waitForPeer(peer, [&] { return arrived.load(std::memory_order_acquire) > step; });
  check(peer, step);
  return segment_.staging(peer, step);
}

void Exchange::close() {
  const uint64_t closed = closed_.load(std::memory_order_relaxed) + 1;
  closed_.store(closed, std::memory_order_relaxed);
  segment_.state(self_).progress.departed.store(closed, std::memory_order_release);
  segment_.wakeAll(self_);
}

void Exchange::check(int peer, uint64_t step) {
  const Signature& mine = segment_.state(self_).progress.signatures[step % kHistory];
  const Signature& theirs = segment_.state(peer).progress.signatures[step % kHistory];
  if (mine == theirs) [[likely]]
    return;
  const bool first = self_ < peer;
  segment_.fail(NcclError(
      ncclInvalidUsage,
      "mismatched collectives on one communicator: " + segment_.nameOf(std::min(self_, peer)) +
          " calls " + describe(first ? mine : theirs) + ", " +
          segment_.nameOf(std::max(self_, peer)) + " calls " + describe(first ? theirs : mine)));
  throw segment_.failure();
}

std::vector<int> Exchange::missingRanks() const {
  const uint64_t step = closed_.load(std::memory_order_relaxed);
  return segment_.ranksWhere([&](int rank) {
    const auto& arrived = segment_.state(rank).progress.arrived;
    return rank != self_ && arrived.load(std::memory_order_acquire) <= step;
  });
}

void Exchange::checkLastSteps() {
  for (uint64_t step = published_ - std::min<uint64_t>(published_, kDepth); step < published_;
       ++step) {
    checkArrived(step);
  }
}

}  // namespace torchcomms_pg::shm
