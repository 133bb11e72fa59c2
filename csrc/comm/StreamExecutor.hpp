// Execution on an accelerator: queued in its streams, and watched by their events.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>

#include "comm/Executor.hpp"
#include "comm/Flight.hpp"
#include "device/AcceleratorDevice.hpp"
#include "device/GraphStream.hpp"

namespace torchcomms_pg {

// Queues operations: a synchronous one in the caller's current stream, an asynchronous one in the
// communicator's. Every call returns when the operation is queued.
class StreamExecutor final : public Executor {
 public:
  StreamExecutor(Communicator& comm, c10::Device device, bool highPriority);

  void prepare(Operation& op) override;
  void run(PreparedOp& call, const WorkPtr& work) override;
  void await(Work& work, Milliseconds timeout, bool onHost) override;
  void awaitInStream(Work& work) override;
  void drain(Milliseconds messages) override;
  bool queues() const override { return true; }
  std::vector<c10::Device> outputDevices() const override { return {device_.device()}; }
  void setBlockingWait(bool blocking) override {
    blockingWait_.store(blocking, std::memory_order_relaxed);
  }
  bool blockingWait() const override { return blockingWait_.load(std::memory_order_relaxed); }
  AcceleratorDevice* accelerator() const override { return &device_; }

  // Records the end of an operation whose stream is past it; finishes it in a thread of its own.
  void finishFromEvent(std::shared_ptr<Flight> flight);
  // Ends an operation of a graph whose Work is dropped: joins it to the stream that has issued it,
  // if nobody has and nobody can any more, and lets go of its memory. `shelf`: what it still needs.
  void leaveGraph(const Flight& flight, std::shared_ptr<const void> shelf) noexcept;

 private:
  void runInStream(PreparedOp& call, const WorkPtr& work);
  void runInGraph(PreparedOp& call, const WorkPtr& work);
  void queue(PreparedOp& call, cudaStream_t stream);
  // Returns whether the capture with the operation goes on.
  bool goesOn(const Flight& flight) const;
  // Waits for an operation that has departed. `work`: null where the caller gets none.
  void awaitStarted(const Flight& flight, const Work* work, Milliseconds timeout, bool onHost);
  bool awaitEnd(const Flight& flight, std::optional<Clock::time_point> deadline);
  // Records that the operation has completed. False: it has failed, or is in no recorder.
  bool recordEnd(const Flight& flight) const;
  // Finishes an operation. `recorded`: its end has been.
  void land(Flight& flight, const std::exception_ptr& error, bool recorded);

  Communicator& comm_;
  mutable AcceleratorDevice device_;
  GraphStream graphStream_;
  std::atomic<bool> blockingWait_{false};
};

}  // namespace torchcomms_pg
