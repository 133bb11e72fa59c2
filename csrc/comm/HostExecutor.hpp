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

class HostExecutor final : public Executor {
 public:
  explicit HostExecutor(Communicator& comm);

  void prepare(Operation& op) override;
  void run(PreparedOp& call, const WorkPtr& work) override;
  void await(Work& work, Milliseconds timeout, bool onHost) override;
  void awaitInStream(Work& work) override;
  void drain(Milliseconds messages) override;
  std::vector<c10::Device> outputDevices() const override { return {}; }

 private:
  void runOnWorker(PreparedOp& call, const WorkPtr& work);
  void runMessages(PreparedOp& call, const WorkPtr& work);
  bool mayBeDeferred(const Operation& op) const;
  bool awaitUninterrupted(Work& work, std::optional<Clock::time_point> deadline);
  // Ends an asynchronous operation.
  void finish(const WorkPtr& work, InFlightOps::Entry entry, const std::exception_ptr& error);
  // Runs `body`, which may block for long, in another thread.
  void runInCallbackThread(std::function<void()> body);

  Communicator& comm_;
  DeferredOps& deferred_;
  WorkerStream& worker_;
  WorkerStream callbacks_{"tcpg_callbacks"};
};

}  // namespace torchcomms_pg
