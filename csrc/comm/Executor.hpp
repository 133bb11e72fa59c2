// Execution of a communicator's operations: the place and the order.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "comm/Work.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

class AcceleratorDevice;
class Communicator;

// Runs operations. Host memory and the streams of an accelerator have an executor each, which holds
// all that differs between them. Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  // Prepares the operation before it is numbered, and notes whether a graph captures it. Raises
  // std::runtime_error if a thread that it needs cannot be started.
  virtual void prepare(Operation& op) = 0;

  // Runs the operation, or queues it. `work` is null if the caller gets no Work.
  virtual void run(PreparedOp& call, const WorkPtr& work) = 0;

  // Waits for the end of `work`, see Work::wait. `onHost`: the calling thread waits, even if the
  // current stream could. Does not raise the operation's own error.
  virtual void await(Work& work, Milliseconds timeout, bool onHost) = 0;

  // Makes the current stream wait for the end of `work`, or the calling thread if the device has no
  // streams.
  virtual void awaitInStream(Work& work) = 0;

  // Waits until nothing is in flight: operations end with their peers, or at their deadlines. If a
  // signal interrupts it, aborts and raises what the handler raised. `messages`: limit of the wait
  // for messages that no stream orders.
  virtual void drain(Milliseconds messages) = 0;

  // Lets the worker finish asynchronous operations that were left to a waiting thread, for a caller
  // that polls for their end.
  virtual void wake() {}

  // Returns whether operations are queued on the device. No thread is then in the library while
  // they run, or sees it fail.
  virtual bool queues() const = 0;

  // Returns the devices of a future's outputs, as ivalue::Future takes them; empty for host memory.
  virtual std::vector<c10::Device> outputDevices() const = 0;

  // Makes Work::wait block the calling thread, even if the current stream could wait.
  virtual void setBlockingWait(bool /*blocking*/) {}
  virtual bool blockingWait() const { return false; }

  // Returns the accelerator's device, or null if operations run in host memory.
  virtual AcceleratorDevice* accelerator() const { return nullptr; }
};

// Makes the executor for tensors on `device`. Raises if this process cannot use it. `highPriority`:
// the priority of its streams.
std::unique_ptr<Executor> makeExecutor(Communicator& comm, c10::Device device, bool highPriority);

}  // namespace torchcomms_pg
