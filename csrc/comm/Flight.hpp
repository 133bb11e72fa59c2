// An operation on an accelerator, from its call until its stream has passed it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <exception>
#include <memory>
#include <optional>

#include "base/Mutex.hpp"
#include "comm/InFlightOps.hpp"
#include "comm/Work.hpp"
#include "device/AcceleratorDevice.hpp"
#include "device/EventPoller.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class StreamExecutor;

// Keeps the operation's state for the monitor and for the thread that finishes the operation. The
// caller owns the Work: the outputs are released with the caller's last reference. Thread-safe.
class Flight final : public EventPoller::Awaited {
 public:
  // Tracks `op`. `owner`: keeps `executor` alive.
  Flight(std::shared_ptr<const void> owner, StreamExecutor& executor, Operation op);
  ~Flight() override;

  const Operation& operation() const { return op_; }

  // Sets the Work. `kept`: also keeps the Work alive, for hooks and futures that need it at the
  // end.
  void attach(const WorkPtr& work, bool kept);
  // Returns the Work, or null if none was set or its last holder has dropped it.
  WorkPtr work() const {
    LockGuard lock(mutex_);
    return work_.lock();
  }

  void setEntry(InFlightOps::Entry entry) { entry_ = entry; }
  InFlightOps::Entry entry() const { return entry_; }

  // Records that the operation is queued in `stream`, and that its caller goes on in `issuer`. The
  // operation ends with `end`, and needs `keepAlive` until then. `start` is null without timing.
  void depart(
      c10::Stream stream, c10::Stream issuer, EventPtr start, EventPtr end,
      std::shared_ptr<const void> keepAlive);
  // Records the same for an operation in the graph that the stream captures. `capture`: the
  // capture's number, see GraphStream; 0 if the operation is in `issuer` itself.
  void departInGraph(
      c10::Stream stream, c10::Stream issuer, EventPtr end, std::shared_ptr<const void> keepAlive,
      uint64_t capture);
  // Records that a future of the operation was completed: a stream of its holder will wait.
  void noteFuture() { hasFuture_.store(true, std::memory_order_relaxed); }

  EventPtr end() const {
    LockGuard lock(mutex_);
    return end_;
  }
  std::optional<c10::Stream> stream() const {
    LockGuard lock(mutex_);
    return stream_;
  }
  std::optional<c10::Stream> issuer() const {
    LockGuard lock(mutex_);
    return issuer_;
  }
  uint64_t capture() const { return capture_; }
  bool hasFuture() const { return hasFuture_.load(std::memory_order_relaxed); }
  bool inGraph() const { return inGraph_.load(std::memory_order_acquire); }

  // Call when the stream `waiting` waits for the operation. If the operation was issued in that
  // stream, releases the buffers that only the operation needs: later work in the stream may reuse
  // their memory.
  void release(const c10::Stream& waiting);
  void release();

  // Asks the device, and returns whether the stream has passed the operation; false in a graph.
  bool reached() const;
  // Returns whether ask() has returned true.
  bool asked() const { return asked_.load(std::memory_order_acquire); }
  // Returns what the device raised in ask(), or null.
  std::exception_ptr error() const {
    LockGuard lock(mutex_);
    return error_;
  }

  bool ask() noexcept override;
  void ended(std::shared_ptr<Awaited> self) noexcept override;

  Clock::time_point started() const { return started_; }
  // Returns the time from start to end of an operation that has ended, or 0 if the time is unknown.
  Clock::duration elapsed() const;

 private:
  const std::shared_ptr<const void> owner_;
  StreamExecutor& executor_;
  const Operation op_;
  InFlightOps::Entry entry_;
  std::atomic<bool> asked_{false};
  std::atomic<bool> inGraph_{false};
  std::atomic<bool> hasFuture_{false};
  uint64_t capture_ = 0;  // written before `inGraph_`
  mutable Mutex mutex_;
  c10::weak_intrusive_ptr<Work> work_ GUARDED_BY(mutex_);
  WorkPtr kept_ GUARDED_BY(mutex_);
  std::optional<c10::Stream> stream_ GUARDED_BY(mutex_);
  std::optional<c10::Stream> issuer_ GUARDED_BY(mutex_);
  const Clock::time_point started_;
  EventPtr start_ GUARDED_BY(mutex_);
  EventPtr end_ GUARDED_BY(mutex_);
  std::shared_ptr<const void> keepAlive_ GUARDED_BY(mutex_);
  std::exception_ptr error_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg
