#include "device/AcceleratorDevice.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/Capture.hpp"
#include "base/TorchCompat.hpp"
#include "host/Interrupt.hpp"

namespace torchcomms_pg {

int deviceCount(c10::DeviceType type) {
  // Uses the CUDA hooks and not the device guard: without a GPU, FakeTensorMode replaces the guard.
  if (type == c10::kCUDA) {
    return at::detail::getCUDAHooks().deviceCount();
  }
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
}

std::optional<c10::DeviceType> presentAccelerator() {
  const auto type = at::accelerator::getAccelerator(/*checked=*/false);
  return type && deviceCount(*type) > 0 ? type : std::nullopt;
}

void awaitCurrentStream(c10::Device device) {
  constexpr std::chrono::microseconds kPoll{50};
  constexpr std::chrono::milliseconds kLook{200};
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto stream = currentStream(device);
  for (auto next = std::chrono::steady_clock::now() + kLook; !guard.queryStream(stream);) {
    std::this_thread::sleep_for(kPoll);
    if (const auto now = std::chrono::steady_clock::now(); now >= next) {
      next = now + kLook;
      if (host::interrupted()) {
        std::rethrow_exception(host::takeInterrupt());
      }
    }
  }
}

void orderStreams(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type(), c10::EventFlag::PYTORCH_DEFAULT);
  event.record(earlier);
  event.block(later);
}

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::vector<c10::Stream> joinCurrentStream(
    c10::Device device, const std::vector<c10::Stream>& streams) {
  const auto current = currentStream(device);
  std::vector<c10::Stream> others;
  for (const auto& stream : streams) {
    if (stream == current || std::ranges::find(others, stream) != others.end()) {
      continue;
    }
    TORCH_CHECK(
        isCapturing(stream) == isCapturing(current),
        "end of a batch: operations were issued in a stream that captures a graph, and others in "
        "one that does not. Issue and end a batch in one stream");
    orderStreams(stream, current);
    others.push_back(stream);
  }
  return others;
}

void takeDevice(c10::Device device) {
  // Calls setDevice, since uncheckedSetDevice does not set a device that has no context yet.
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  if (device.is_cuda()) {
    useThreadLocalCaptureMode();
  }
}

AcceleratorDevice::AcceleratorDevice(c10::Device device, bool highPriority)
    : device_(device),
      own_(newStream(highPriority)),
      finisher_("tcpg_finish"),
      watch_(EventPoller::of(device)) {
  watch_.join();
}

c10::Stream AcceleratorDevice::currentStream() const {
  return torchcomms_pg::currentStream(device());
}

c10::Stream AcceleratorDevice::newStream(bool highPriority) const {
  return c10::impl::VirtualGuardImpl(device().type())
      .getStreamFromGlobalPool(device(), highPriority);
}

c10::Stream AcceleratorDevice::streamAfter(const c10::Stream& issuer) {
  record(issuer, /*timed=*/false)->block(own_);
  return own_;
}

EventPtr AcceleratorDevice::record(const c10::Stream& stream, bool timed) {
  std::unique_ptr<c10::Event> event;
  {
    const LockGuard lock(events_->mutex);
    auto& free = events_->free[timed];
    if (!free.empty()) {
      event = std::move(free.back());
      free.pop_back();
    }
  }
  if (!event) {
    event = std::make_unique<c10::Event>(
        device().type(), timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  }
  event->record(stream);
  // A stream that has been told to wait for the event waits for this recording, even if the event
  // is reused and recorded again before the stream reaches the wait.
  return {event.release(), [events = events_, timed](c10::Event* done) {
            const LockGuard lock(events->mutex);
            events->free[timed].emplace_back(done);
          }};
}

}  // namespace torchcomms_pg
