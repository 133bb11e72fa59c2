// The operations in flight, which the monitor examines.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <thread>
#include <utility>

#include "base/Mutex.hpp"
#include "base/Thread.hpp"
#include "comm/Work.hpp"
#include "operation/GroupTotals.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Flight;

struct InFlight {
  const Operation* op;
  WorkPtr work = {};                    // keeps `op` alive; null if something else does
  std::shared_ptr<Flight> flight = {};  // on an accelerator, the operation's state; else null
  std::shared_ptr<void> keeper = {};    // keeps `op` alive if none of the above does
  std::thread::id teller = {};          // thread that reports the end now, if any
  bool left = false;   // its call has returned; the waiting thread, if any, is unknown
  bool ended = false;  // its end is being reported
  uint64_t thread = threadNumber();  // the thread that has issued it
};

// The list of operations in flight, and the last completed one. For deadlines and diagnoses an
// operation is in flight until it has ended; for awaitNone() until its end has been reported to
// hooks and futures, too. Keeps the totals of the group. Thread-safe.
class InFlightOps {
 public:
  using List = std::list<InFlight>;  // sorted by issue
  using Entry = List::iterator;

  explicit InFlightOps(std::shared_ptr<GroupTotals> totals) : totals_(std::move(totals)) {}

  Entry add(const Operation& op, WorkPtr work = nullptr, std::shared_ptr<Flight> flight = nullptr) {
    return insert({.op = &op, .work = std::move(work), .flight = std::move(flight)});
  }
  Entry add(const Operation& op, std::shared_ptr<void> keeper) {
    return insert({.op = &op, .keeper = std::move(keeper)});
  }

  // Records that the call of an operation has returned, and that the waiting thread, if any, is
  // unknown. Does nothing if the operation has ended.
  void leave(const Operation& op);
  // Records that an operation has ended, and that the calling thread is about to report it. A
  // completed operation becomes the last completed one.
  void end(Entry entry, const OpEnd& end);
  // Records which thread reports the end from now on; none until another thread takes that over.
  void setTeller(Entry entry, std::thread::id teller);
  // Removes an operation whose end has been reported, or needs no report.
  void remove(Entry entry);
  // Does the same as end() and remove(), for an end that needs no report.
  void finish(Entry entry, const OpEnd& end) {
    this->end(entry, end);
    remove(entry);
  }

  GroupTotals& totals() const { return *totals_; }
  const std::shared_ptr<GroupTotals>& sharedTotals() const { return totals_; }

  // Returns whether the operation has not ended. `op` may be a copy of it.
  bool has(const Operation& op) const;
  // Returns the number of operations that have not ended.
  size_t size() const;

  // Calls `body` with the list of operations that have not ended, and the last completed one, whose
  // seq is 0 if none has completed. Neither changes meanwhile.
  template <class Body>
  auto inspect(Body&& body) const {
    LockGuard lock(mutex_);
    return body(ops_, lastCompleted_);
  }

  // Waits until nothing is in flight. `messages`: ignores messages that no stream orders. Returns
  // false if `time` passes first. A thread that is reporting an end, such as one whose hook ends
  // the group, does not wait for other reporting threads: they might wait for this thread.
  bool awaitNone(Milliseconds time, bool messages);

  // Lengthens the timeout of operations issued from now on, until the first of them has finished.
  void lengthen(Milliseconds extra) {
    extraMs_.fetch_add(extra.count(), std::memory_order_relaxed);
  }
  Milliseconds lengthened() const { return Milliseconds(extraMs_.load(std::memory_order_relaxed)); }

 private:
  Entry insert(InFlight entry);
  void countInFlight() REQUIRES(mutex_);

  const std::shared_ptr<GroupTotals> totals_;
  mutable Mutex mutex_;
  std::condition_variable none_;
  List ops_ GUARDED_BY(mutex_);     // operations that have not ended
  List ending_ GUARDED_BY(mutex_);  // operations that have ended, but are not fully reported
  Operation lastCompleted_ GUARDED_BY(mutex_);
  std::atomic<int64_t> extraMs_{0};
};

}  // namespace torchcomms_pg
