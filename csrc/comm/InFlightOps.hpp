// The operations in flight, which the monitor looks at.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>

#include "comm/Work.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Flight;

struct InFlight {
  const Operation* op;
  WorkPtr work;                    // keeps `op`; null: a calling thread or `flight` does
  std::shared_ptr<Flight> flight;  // state of an operation on an accelerator
};

// The list of operations in flight, and the last completed one. Thread-safe.
class InFlightOps {
 public:
  using List = std::list<InFlight>;  // sorted by issue
  using Entry = List::iterator;

  Entry add(const Operation& op, WorkPtr work = nullptr, std::shared_ptr<Flight> flight = nullptr);

  // Removes an operation. `completed`: it becomes the last completed one.
  void remove(Entry entry, bool completed = true);

  bool empty() const;
  // Returns whether exactly one operation is in flight.
  bool single() const;

  // Calls `body` with the list and the last completed operation, whose seq is 0 where there is
  // none. Neither changes meanwhile.
  template <class Body>
  auto inspect(Body&& body) const {
    std::lock_guard lock(mutex_);
    return body(ops_, lastCompleted_);
  }

  // Waits until nothing is in flight. `messages`: except messages that no stream orders. False:
  // `time` has passed first.
  bool awaitNone(Milliseconds time, bool messages);

  // Lengthens the timeout of operations issued from now on, until the first of them has finished.
  void lengthen(Milliseconds extra) {
    extraMs_.fetch_add(extra.count(), std::memory_order_relaxed);
  }
  Milliseconds lengthened() const { return Milliseconds(extraMs_.load(std::memory_order_relaxed)); }

 private:
  mutable std::mutex mutex_;
  std::condition_variable none_;
  List ops_;
  Operation lastCompleted_;
  std::atomic<int64_t> extraMs_{0};
};

}  // namespace torchcomms_pg
