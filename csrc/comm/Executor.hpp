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

// Runs operations; all that differs between host memory and the streams of an accelerator, which
// have an executor each. Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  // Prepares the operation before it counts: notes whether it goes into a graph. Raises
  // std::runtime_error where a thread that it needs cannot be started.
  virtual void prepare(Operation& op) = 0;

  // Runs the operation, or queues it. `work`: null where the caller gets none.
  virtual void run(PreparedOp& call, const WorkPtr& work) = 0;

  // Waits for the end of `work`, see Work::wait. `onHost`: the calling thread waits, also where the
  // current stream could. Does not raise the operation's own error.
  virtual void await(Work& work, Milliseconds timeout, bool onHost) = 0;

  // Makes the current stream wait for the end of `work`; where there are no streams, the calling
  // thread.
  virtual void awaitInStream(Work& work) = 0;

  // Returns when nothing is in flight: operations end with their peers, or at their deadlines.
  // Interrupted, it aborts, and raises what the handler of the signal has raised. Waits for
  // messages that no stream orders no longer than `messages`.
  virtual void drain(Milliseconds messages) = 0;

  // Lets the worker finish asynchronous operations that were left to a waiting thread: a caller may
  // look for their end without waiting.
  virtual void wake() {}

  // Returns whether operations wait in a queue of the device, so that no thread is in the library
  // while they run, or sees it fail.
  virtual bool queues() const = 0;

  // Returns the devices of a future's outputs, as ivalue::Future takes them: none for host memory.
  virtual std::vector<c10::Device> outputDevices() const = 0;

  // Makes Work::wait stop the calling thread, also where the current stream could wait.
  virtual void setBlockingWait(bool /*blocking*/) {}
  virtual bool blockingWait() const { return false; }

  // Returns the accelerator's device. Null: operations run in host memory.
  virtual AcceleratorDevice* accelerator() const { return nullptr; }
};

// Makes the executor for tensors on `device`. Raises where this process cannot use it.
// `highPriority`: that of its streams.
std::unique_ptr<Executor> makeExecutor(Communicator& comm, c10::Device device, bool highPriority);

}  // namespace torchcomms_pg
