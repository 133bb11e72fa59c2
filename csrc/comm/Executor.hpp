// Where and in what order the operations of a communicator run.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "comm/PreparedOp.hpp"
#include "comm/Work.hpp"

namespace torchcomms_pg {

class AcceleratorDevice;
class Communicator;

// Thread-safe. There is one for host memory and one for the streams of an accelerator: what differs
// between the two in how operations run is here.
class Executor {
 public:
  virtual ~Executor() = default;

  // Before the operation counts: notes whether it goes into a graph. Raises std::runtime_error
  // where a thread that it takes cannot be started.
  virtual void prepare(Operation& op) = 0;

  // Runs the operation, or queues it. `work`: null where the caller gets none.
  virtual void run(PreparedOp& call, const WorkPtr& work) = 0;

  // Waits for the end of `work`, see Work::wait. `onHost`: the calling thread waits, also where
  // the current stream could. Does not raise what the operation has failed with.
  virtual void await(Work& work, Milliseconds timeout, bool onHost) = 0;

  // The current stream waits for the end of `work`; where there are none, the calling thread.
  virtual void awaitInStream(Work& work) = 0;

  // Returns when nothing is in flight: what is ends with its peers, or at its deadline.
  // Interrupted, it aborts, and raises what the handler of the signal has raised. Messages that no
  // stream orders are waited for no longer than `messages`.
  virtual void drain(Milliseconds messages) = 0;

  // Makes asynchronous operations end that were left to whoever waits for them: somebody may look
  // for their end without waiting.
  virtual void wake() {}

  // Whether operations wait in a queue of the device, so that no thread is in the library while
  // they run, or sees it fail.
  virtual bool queues() const = 0;

  // Where a future's outputs are, as ivalue::Future takes it: host memory has no name there.
  virtual std::vector<c10::Device> outputDevices() const = 0;

  // Makes Work::wait stop the calling thread, also where the current stream could wait.
  virtual void setBlockingWait(bool /*blocking*/) {}
  virtual bool blockingWait() const { return false; }

  // Null: operations run in host memory.
  virtual AcceleratorDevice* accelerator() const { return nullptr; }
};

// For tensors on `device`. Raises where this process cannot use it. `highPriority`: of streams.
std::unique_ptr<Executor> makeExecutor(Communicator& comm, c10::Device device, bool highPriority);

}  // namespace torchcomms_pg
