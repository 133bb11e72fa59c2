// Where a communicator's operations run, and in what order.
#pragma once

#include <c10/core/Device.h>
#include <nccl.h>

#include <functional>
#include <memory>

namespace c10 {
struct Event;
}

namespace torchcomms_pg {

class AcceleratorDevice;

// A point in a stream of an accelerator.
using EventPtr = std::shared_ptr<const c10::Event>;

class Device {
 public:
  virtual ~Device() = default;

  const c10::Device& device() const { return device_; }

  // Before an asynchronous operation: raises std::runtime_error where the thread that it takes
  // cannot be started.
  virtual void prepare() = 0;

  // The stream for the next operation: the caller's own, on which it runs in
  // the caller's order, or (`async`) the communicator's, ordered behind what
  // the caller has done so far.
  virtual cudaStream_t stream(bool async) = 0;

  // Runs `body` in the order of `stream`. It does not throw.
  virtual void run(cudaStream_t stream, std::function<void()> body) = 0;

  // What is run from now on may wait, instead of waking a thread, until wake() or help(). For one
  // thread at a time.
  virtual void defer() {}

  // Runs what was deferred, and what is run from now on.
  virtual void wake() {}

  // Called from a body that `run` was given: what follows in the stream need
  // not wait for the rest of it.
  virtual void handOver() = 0;

  // Runs `body`, which may block for long, in some other thread, soon.
  virtual void runApart(std::function<void()> body) = 0;

  // Has the calling thread, which would only wait for `done`, do waiting work
  // where that is faster. May return before `done`.
  virtual void help(const std::function<bool()>& done) = 0;

  // This, where it is one: its operations end later than the calls that queue
  // them.
  virtual AcceleratorDevice* accelerator() { return nullptr; }

  // For another communicator on the same device.
  virtual std::unique_ptr<Device> another() const = 0;

 protected:
  explicit Device(c10::Device device) : device_(device) {}

 private:
  const c10::Device device_;
};

}  // namespace torchcomms_pg
