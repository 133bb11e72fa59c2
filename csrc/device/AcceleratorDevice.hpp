// The streams and events of an accelerator, in c10's generic classes and so independent of CUDA.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "device/EventPoller.hpp"
#include "device/WorkerStream.hpp"

namespace torchcomms_pg {

// An event recorded in a stream, which marks a point in the stream's work.
using EventPtr = std::shared_ptr<const c10::Event>;

// Returns the number of devices of the type that torch sees.
int deviceCount(c10::DeviceType type);

// Returns the type of the accelerators that torch sees, or nullopt if torch sees none.
std::optional<c10::DeviceType> presentAccelerator();

// Waits until all work queued so far in the device's current stream has run. Raises the exception
// of a signal handler that has raised during the wait.
void awaitCurrentStream(c10::Device device);

// Makes `later` wait for all work queued so far in `earlier`.
void orderStreams(const c10::Stream& earlier, const c10::Stream& later);

// Returns the device's current stream.
c10::Stream currentStream(c10::Device device);

// Makes the device's current stream wait for all work queued so far in `streams`, in which the
// operations of a batch were issued. Returns `streams` without the current stream and without
// duplicates. Raises if graphs capture only some of the streams.
std::vector<c10::Stream> joinCurrentStream(
    c10::Device device, const std::vector<c10::Stream>& streams);

// Makes the device current in the calling thread, which this project has started, and lets the
// thread call the device's runtime while other threads capture graphs. Otherwise a library's call
// in the thread could create a context on device 0 or invalidate a capture. Raises torch's error if
// the device cannot be used.
void takeDevice(c10::Device device);

class AcceleratorDevice final {
 public:
  // Raises if this process cannot use the device.
  AcceleratorDevice(c10::Device device, bool highPriority);
  ~AcceleratorDevice() { watch_.leave(); }
  AcceleratorDevice(const AcceleratorDevice&) = delete;
  AcceleratorDevice& operator=(const AcceleratorDevice&) = delete;

  const c10::Device& device() const { return device_; }

  // Starts the threads that an operation needs. Raises std::runtime_error if that is impossible.
  void prepare() {
    finisher_.start();
    watch_.start();
  }

  // Returns the thread that finishes operations, which may block it for long.
  WorkerStream& finisher() { return finisher_; }

  // Returns the communicator's stream. Its later work waits for all work now queued in `issuer`.
  c10::Stream streamAfter(const c10::Stream& issuer);

  c10::Stream currentStream() const;
  // Returns a stream of torch's pool, which has few streams and hands them out in turn.
  c10::Stream newStream(bool highPriority) const;

  // Records an event after all work queued so far in `stream`. A `timed` event can measure
  // durations.
  EventPtr record(const c10::Stream& stream, bool timed);

  // Returns the poller of this device, which notices the ends of operations.
  EventPoller& watch() const { return watch_; }

  static cudaStream_t handle(const c10::Stream& stream) {
    return static_cast<cudaStream_t>(stream.native_handle());
  }

 private:
  // Events for reuse, since making an event is slow.
  struct Events {
    Mutex mutex;
    std::vector<std::unique_ptr<c10::Event>> free[2] GUARDED_BY(mutex);  // without and with timing
  };

  const c10::Device device_;
  const c10::Stream own_;
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();
  WorkerStream finisher_;
  EventPoller& watch_;
};

}  // namespace torchcomms_pg
