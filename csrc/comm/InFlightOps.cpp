#include "comm/InFlightOps.hpp"

#include <algorithm>
#include <utility>

namespace torchcomms_pg {

InFlightOps::Entry InFlightOps::insert(InFlight entry) {
  LockGuard lock(mutex_);
  const auto added = ops_.insert(ops_.end(), std::move(entry));
  countInFlight();
  return added;
}

void InFlightOps::countInFlight() {
  totals_->setInFlight(ops_.size(), ops_.empty() ? Clock::time_point{} : ops_.front().op->issued);
}

void InFlightOps::leave(const Operation& op) {
  LockGuard lock(mutex_);
  const auto entry = std::find_if(
      ops_.rbegin(), ops_.rend(), [&](const InFlight& each) { return each.op == &op; });
  if (entry != ops_.rend()) {
    entry->left = true;
  }
}

void InFlightOps::end(Entry entry, const OpEnd& end) {
  LockGuard lock(mutex_);
  if (end.completed) {
    lastCompleted_.noteFrom(*entry->op);
  }
  totals_->end(*entry->op, end);
  entry->ended = true;
  entry->teller = std::this_thread::get_id();
  ending_.splice(ending_.end(), ops_, entry);
  countInFlight();
  if (const auto extra = entry->op->extra.count(); extra > 0) {
    // The first operation to finish ends the extra time that was added before its issue.
    const auto current = extraMs_.load(std::memory_order_relaxed);
    extraMs_.store(current >= extra ? current - extra : 0, std::memory_order_relaxed);
  }
  if (ops_.empty()) {
    none_.notify_all();  // awaitNone() of a reporting thread ignores `ending_`
  }
}

void InFlightOps::setTeller(Entry entry, std::thread::id teller) {
  LockGuard lock(mutex_);
  entry->teller = teller;
}

void InFlightOps::remove(Entry entry) {
  List gone;  // freed after the lock is released
  {
    LockGuard lock(mutex_);
    gone.splice(gone.begin(), entry->ended ? ending_ : ops_, entry);
    countInFlight();
    if (!ops_.empty() || !ending_.empty()) {
      return;
    }
  }
  none_.notify_all();
}

bool InFlightOps::has(const Operation& op) const {
  LockGuard lock(mutex_);
  return std::ranges::any_of(ops_, [&](const InFlight& entry) {
    return entry.op->seq == op.seq && entry.op->kind == op.kind;
  });
}

size_t InFlightOps::size() const {
  LockGuard lock(mutex_);
  return ops_.size();
}

bool InFlightOps::awaitNone(Milliseconds time, bool messages) {
  const auto self = std::this_thread::get_id();
  UniqueLock lock(mutex_);
  const bool tells =
      std::ranges::any_of(ending_, [self](const InFlight& entry) { return entry.teller == self; });
  return none_.wait_for(lock, time, [&]() REQUIRES(mutex_) {
    return (tells || ending_.empty()) &&
           std::ranges::all_of(
               ops_, [messages](const InFlight& entry) { return messages && !entry.op->ordered; });
  });
}

}  // namespace torchcomms_pg
