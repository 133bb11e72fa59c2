// Execution on an accelerator: operations are queued in streams and watched by events.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>

#include "comm/Executor.hpp"
#include "comm/Flight.hpp"
#include "comm/Identity.hpp"
#include "device/AcceleratorDevice.hpp"
#include "device/GraphStream.hpp"

namespace torchcomms_pg {

class CommHandle;
class FailureState;
class GroupHooks;
class Joining;
class Watchdog;

// Queues operations: synchronous ones in the caller's current stream, asynchronous ones in the
// communicator's. Every call but a synchronous barrier returns when the operation is queued.
class StreamExecutor final : public Executor {
 public:
  // `highPriority`: whether the streams have high priority.
  StreamExecutor(
      const Identity& self, bool highPriority, CommHandle& library, Joining& joining,
      InFlightOps& inFlight, GroupHooks& hooks, FailureState& failureState, Watchdog& watchdog)
      : self_(self),
        library_(library),
        joining_(joining),
        inFlight_(inFlight),
        hooks_(hooks),
        failureState_(failureState),
        watchdog_(watchdog),
        device_(self.device(), highPriority),
        graphStream_(device_, highPriority) {}

  void prepare(Operation& op) override;
  void run(PreparedOp& call, const WorkPtr& work) override;
  void await(Work& work, Milliseconds timeout, bool onHost) override;
  void awaitInStream(Work& work) override;
  void drain(Milliseconds messages) override;
  void setBlockingWait(bool blocking) override {
    blockingWait_.store(blocking, std::memory_order_relaxed);
  }
  AcceleratorDevice* accelerator() const override { return &device_; }

  // Records the end of an operation that its stream has passed, and finishes the operation in a
  // separate thread.
  void finishFromEvent(std::shared_ptr<Flight> flight);
  // Ends an operation in a graph, after its last reference, if the issuing stream has not waited
  // for it. While the capture goes on, makes that stream wait or, if the operation has a future,
  // keeps `keepAlive`, its buffers, until the capture's end.
  void leaveGraph(const Flight& flight, std::shared_ptr<const void> keepAlive) noexcept;

 private:
  void runInStream(PreparedOp& call, const WorkPtr& work);
  void runInGraph(PreparedOp& call, const WorkPtr& work);
  // Queues the operation in `stream`. If that raises, makes the caller's stream `issuer` wait for
  // `stream`, see joinAfterError().
  void queue(PreparedOp& call, const c10::Stream& stream, const c10::Stream& issuer);
  void joinAfterError(
      const c10::Stream& stream, const c10::Stream& issuer,
      const std::vector<c10::Stream>& others) noexcept;
  // Returns whether the capture that contains the operation goes on.
  bool goesOn(const Flight& flight) const;
  // Waits for an operation that is in its stream, if the host has to wait: with a timeout, with
  // `onHost`, and for a barrier. Raises if the library has failed. `work` is null if the caller
  // gets no Work.
  void awaitStarted(const Flight& flight, const Work* work, Milliseconds timeout, bool onHost);
  bool awaitEnd(const Flight& flight, std::optional<Clock::time_point> deadline);
  // Enters the operation's completion in the recorders. Returns false if the operation has failed
  // or is not recorded.
  bool recordEnd(const Flight& flight) const;
  // Finishes an operation. `recorded`: whether recordEnd() has recorded its end.
  void land(Flight& flight, const std::exception_ptr& error, bool recorded);

  const Identity& self_;
  CommHandle& library_;
  Joining& joining_;
  InFlightOps& inFlight_;
  GroupHooks& hooks_;
  FailureState& failureState_;
  Watchdog& watchdog_;
  mutable AcceleratorDevice device_;
  GraphStream graphStream_;
  std::atomic<bool> blockingWait_{false};
};

}  // namespace torchcomms_pg
