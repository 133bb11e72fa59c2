// The operations in flight, which the monitor looks at.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/GroupTotals.hpp"
#include "comm/Work.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Flight;

struct InFlight {
  const Operation* op;
  WorkPtr work;                    // keeps `op`; null: a calling thread or `flight` does
  std::shared_ptr<Flight> flight;  // state of an operation on an accelerator
  std::thread::id teller;          // thread that tells of its end; none: it has not ended
  bool left = false;               // its call has returned, and nobody can tell who waits for it
  std::shared_ptr<void> keeper;    // keeps `op`, where none of the above does
};

// The list of operations in flight, and the last completed one. An operation that has ended is no
// more in flight for deadlines and diagnoses, but is until everybody has been told for those who
// wait that nothing is. Keeps the totals of the group. Thread-safe.
class InFlightOps {
 public:
  using List = std::list<InFlight>;  // sorted by issue
  using Entry = List::iterator;

  explicit InFlightOps(std::shared_ptr<GroupTotals> totals) : totals_(std::move(totals)) {}

  Entry add(const Operation& op, WorkPtr work = nullptr, std::shared_ptr<Flight> flight = nullptr);
  Entry add(const Operation& op, std::shared_ptr<void> keeper);

  // Notes that the call of an operation, which may have ended, has returned, and that nobody can
  // tell who waits for it.
  void leave(const Operation& op);
  // Notes that an operation has ended, and that the calling thread is about to tell of it. One that
  // has completed becomes the last completed one.
  void end(Entry entry, const OpEnd& end);
  // Notes that the calling thread goes on with telling.
  void tellHere(Entry entry);
  // Removes an operation, when everybody has been told of its end, or where nobody is.
  void remove(Entry entry);
  // Does the same as end() and remove(), where nobody is told.
  void finish(Entry entry, const OpEnd& end);

  GroupTotals& totals() const { return *totals_; }

  // Returns whether the operation, of which `op` is a copy, has not ended.
  bool has(const Operation& op) const;
  // Returns whether all operations have ended.
  bool empty() const;
  // Returns whether all operations but one have ended.
  bool single() const;

  // Calls `body` with the list of operations that have not ended, and the last completed one, whose
  // seq is 0 where there is none. Neither changes meanwhile.
  template <class Body>
  auto inspect(Body&& body) const {
    std::lock_guard lock(mutex_);
    return body(ops_, lastCompleted_);
  }

  // Waits until nothing is in flight. `messages`: except messages that no stream orders. A thread
  // that tells of an end itself, such as a hook that ends the group, waits for no other such
  // thread, which might wait for this one. False: `time` has passed first.
  bool awaitNone(Milliseconds time, bool messages);

  // Lengthens the timeout of operations issued from now on, until the first of them has finished.
  void lengthen(Milliseconds extra) {
    extraMs_.fetch_add(extra.count(), std::memory_order_relaxed);
  }
  Milliseconds lengthened() const { return Milliseconds(extraMs_.load(std::memory_order_relaxed)); }

 private:
  // Call with the lock held.
  void noteEnd(const Operation& op, const OpEnd& end);
  void countInFlight();

  const std::shared_ptr<GroupTotals> totals_;
  mutable std::mutex mutex_;
  std::condition_variable none_;
  List ops_;     // operations that have not ended
  List ending_;  // operations that have ended, of which not everybody has been told
  Operation lastCompleted_;
  std::atomic<int64_t> extraMs_{0};
};

}  // namespace torchcomms_pg
