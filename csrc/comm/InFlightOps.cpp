#include "comm/InFlightOps.hpp"

#include <algorithm>
#include <utility>

namespace torchcomms_pg {

InFlightOps::Entry InFlightOps::add(
    const Operation& op, WorkPtr work, std::shared_ptr<Flight> flight) {
  std::lock_guard lock(mutex_);
  return ops_.insert(ops_.end(), InFlight{&op, std::move(work), std::move(flight)});
}

void InFlightOps::remove(Entry entry, bool completed) {
  List gone;  // freed after the lock is released
  {
    std::lock_guard lock(mutex_);
    if (completed) {
      lastCompleted_.noteFrom(*entry->op);
    }
    gone.splice(gone.begin(), ops_, entry);
    if (const auto extra = entry->op->extra.count(); extra > 0) {
      // The first to finish ends the extra time that was added before it was issued.
      const auto current = extraMs_.load(std::memory_order_relaxed);
      extraMs_.store(current >= extra ? current - extra : 0, std::memory_order_relaxed);
    }
    if (!ops_.empty()) {
      return;
    }
  }
  none_.notify_all();
}

bool InFlightOps::empty() const {
  std::lock_guard lock(mutex_);
  return ops_.empty();
}

bool InFlightOps::single() const {
  std::lock_guard lock(mutex_);
  return ops_.size() == 1;
}

bool InFlightOps::awaitNone(Milliseconds time, bool messages) {
  std::unique_lock lock(mutex_);
  return none_.wait_for(lock, time, [&] {
    return std::ranges::all_of(
        ops_, [messages](const InFlight& entry) { return messages && !entry.op->ordered; });
  });
}

}  // namespace torchcomms_pg
