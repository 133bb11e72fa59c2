// Execution in host memory: the caller's thread acts as the current stream, and a worker runs the
// asynchronous operations that a stream orders.
#pragma once

#include <exception>
#include <functional>
#include <optional>

#include "comm/DeferredOps.hpp"
#include "comm/Executor.hpp"
#include "comm/InFlightOps.hpp"
#include "device/WorkerStream.hpp"

namespace torchcomms_pg {

class CommHandle;
class FailureState;
class GroupHooks;
class Joining;
class Observer;
class Watchdog;

class HostExecutor final : public Executor {
 public:
  HostExecutor(
      CommHandle& library, Joining& joining, InFlightOps& inFlight, GroupHooks& hooks,
      DeferredOps& deferred, FailureState& failureState, Watchdog& watchdog, Observer& observer)
      : library_(library),
        joining_(joining),
        inFlight_(inFlight),
        hooks_(hooks),
        deferred_(deferred),
        failureState_(failureState),
        watchdog_(watchdog),
        observer_(observer),
        worker_(deferred_.worker()) {}

  void prepare(Operation& op) override;
  void run(PreparedOp& call, const WorkPtr& work) override;
  void await(Work& work, Milliseconds timeout, bool onHost) override;
  void awaitInStream(Work& work) override { work.synchronize(); }
  void drain(Milliseconds messages) override;

 private:
  void runOnWorker(PreparedOp& call, const WorkPtr& work);
  void runMessages(PreparedOp& call, const WorkPtr& work);
  bool mayBeDeferred(const Work& work) const;
  bool awaitUninterrupted(Work& work, std::optional<Clock::time_point> deadline);
  // Ends an asynchronous operation.
  void finish(const WorkPtr& work, InFlightOps::Entry entry, const std::exception_ptr& error);
  // Runs `body`, which may block for long, in another thread.
  void runInCallbackThread(std::function<void()> body);

  CommHandle& library_;
  Joining& joining_;
  InFlightOps& inFlight_;
  GroupHooks& hooks_;
  DeferredOps& deferred_;
  FailureState& failureState_;
  Watchdog& watchdog_;
  Observer& observer_;
  WorkerStream& worker_;
  WorkerStream callbacks_{"tcpg_callbacks"};
};

}  // namespace torchcomms_pg
