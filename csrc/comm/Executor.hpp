// Execution of a communicator's operations: where, and in which order.
#pragma once

#include "comm/Work.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

class AcceleratorDevice;

// Runs operations. HostExecutor is for host memory, StreamExecutor for an accelerator's streams;
// all that differs between the two is in these classes. Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  // Starts the threads that the operation needs, and notes whether a graph captures it. Call before
  // the operation is numbered. Raises std::runtime_error if a thread cannot be started.
  virtual void prepare(Operation& op) = 0;

  // Runs the operation, or queues it. `work` is null if the caller gets no Work.
  virtual void run(PreparedOp& call, const WorkPtr& work) = 0;

  // Waits for the end of `work`, see Work::wait. `onHost`: the calling thread waits, even if the
  // current stream could. If `work` has finished, does not raise its error.
  virtual void await(Work& work, Milliseconds timeout, bool onHost) = 0;

  // Makes the current stream wait for the end of `work`, or the calling thread if the device has no
  // streams.
  virtual void awaitInStream(Work& work) = 0;

  // Waits until nothing is in flight: operations end with their peers, or at their deadlines. In
  // host memory, if a signal's handler raises, fails the communicator and raises the handler's
  // exception. On an accelerator, returns at the latest 10 s after a failure. `messages`: limit of
  // the wait for messages that no stream orders.
  virtual void drain(Milliseconds messages) = 0;

  // Sets whether Work::wait blocks the calling thread, even if the current stream could wait.
  virtual void setBlockingWait(bool /*blocking*/) {}

  // Returns the accelerator's device, or null if operations run in host memory.
  virtual AcceleratorDevice* accelerator() const { return nullptr; }
};

}  // namespace torchcomms_pg
