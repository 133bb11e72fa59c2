// An accelerator: operations are queued in its streams, and the host does not
// wait. Everything goes through c10's generic classes, so that nothing here
// depends on CUDA.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "device/EventWatch.hpp"
#include "device/WorkerStream.hpp"

namespace torchcomms_pg {

// A point in a stream.
using EventPtr = std::shared_ptr<const c10::Event>;

// How many devices of the type torch sees.
int deviceCount(c10::DeviceType type);

// The type of accelerator of which torch sees a device; null where it sees none.
std::optional<c10::DeviceType> presentAccelerator();

class AcceleratorDevice final {
 public:
  // Raises where this process cannot use the device.
  AcceleratorDevice(c10::Device device, bool highPriority);
  ~AcceleratorDevice() { watch_.leave(); }
  AcceleratorDevice(const AcceleratorDevice&) = delete;
  AcceleratorDevice& operator=(const AcceleratorDevice&) = delete;

  const c10::Device& device() const { return device_; }

  // Before an operation: raises std::runtime_error where a thread that it takes cannot be started.
  void prepare() {
    finisher_.start();
    watch_.start();
  }

  // Runs `body`, which may block for long, in the thread that finishes operations.
  void runApart(std::function<void()> body) { finisher_.enqueue(std::move(body)); }
  // Called from such a body: what follows need not wait for the rest of it.
  void handOver() { finisher_.handOver(); }

  // The communicator's stream; what comes next in it waits for what is in `issuer` so far.
  c10::Stream streamAfter(const c10::Stream& issuer);

  c10::Stream currentStream() const;

  // The end of what is in `stream` so far. `timed`: for a duration.
  EventPtr record(const c10::Stream& stream, bool timed);

  // `stream` goes on when the event has happened; the host does not wait.
  void await(const c10::Event& event, const c10::Stream& stream) const;

  // Where the ends of operations are awaited.
  EventWatch& watch() const { return watch_; }

  static cudaStream_t handle(const c10::Stream& stream) {
    return static_cast<cudaStream_t>(stream.native_handle());
  }

 private:
  // Events are costly to make, so they are used again.
  struct Events {
    std::mutex mutex;
    std::vector<std::unique_ptr<c10::Event>> free[2];  // without and with timing
  };

  const c10::Device device_;
  const c10::Stream own_;
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();
  WorkerStream finisher_;
  EventWatch& watch_;
};

}  // namespace torchcomms_pg
