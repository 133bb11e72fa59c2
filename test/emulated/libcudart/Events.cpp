// Events: marks in a stream that others wait for or ask about (Runtime API,
// "Event Management").
#include <chrono>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "libcudart/Calls.hpp"
#include "libcudart/Captures.hpp"
#include "libcudart/Devices.hpp"
#include "libcudart/Streams.hpp"

namespace emulated {

namespace {

// Stands for its latest record; before the first it is over (cudaEventQuery:
// "or if no work has been captured").
struct Event {
  const int device;
  const unsigned flags;
  std::mutex mutex;
  MarkPtr mark;
  std::shared_ptr<Capture> capture;  // in which it was recorded last
  Ends ends;
};

using EventPtr = std::shared_ptr<Event>;

struct Events {
  std::mutex mutex;
  std::unordered_map<cudaEvent_t, EventPtr> alive;
};

// Never destroyed: threads ask until the process is gone.
Events& events() {
  static auto* const instance = new Events;
  return *instance;
}

EventPtr findEvent(cudaEvent_t handle) {
  const std::lock_guard lock(events().mutex);
  const auto found = events().alive.find(handle);
  return found == events().alive.end() ? nullptr : found->second;
}

cudaError_t notAnEvent(const char* function) {
  return failed(cudaErrorInvalidResourceHandle, function);
}

cudaError_t create(cudaEvent_t* handle, unsigned flags, const char* function) {
  calledDriver(function);
  needContext(function);
  auto event = std::make_shared<Event>(currentDevice(), flags);
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  const std::lock_guard lock(events().mutex);
  events().alive[*handle] = std::move(event);
  return cudaSuccess;
}

void setRecord(Event& event, MarkPtr mark, std::shared_ptr<Capture> capture, Ends ends) {
  const std::lock_guard lock(event.mutex);
  event.mark = std::move(mark);
  event.capture = std::move(capture);
  event.ends = std::move(ends);
}

MarkPtr latest(Event& event) {
  const std::lock_guard lock(event.mutex);
  return event.mark;
}

cudaError_t record(cudaEvent_t handle, cudaStream_t in, unsigned flags, const char* function) {
  calledDriver(function);
  const auto event = findEvent(handle);
  if (event == nullptr) return notAnEvent(function);
  auto* const stream = findStream(in);
  // "The event and stream must be from the same CUDA context".
  if (stream == nullptr || stream->device() != event->device) return notAnEvent(function);
  if (const auto error = refuseImplicit(*stream, function)) return error;
  if (!stream->capturing.load(std::memory_order_acquire)) {
    setRecord(*event, stream->record(), nullptr, {});
    return cudaSuccess;
  }
  if ((flags & cudaEventRecordExternal) != 0) {
    // "captured as an external event node": each replay records it.
    return stream->queue([event] {
      auto mark = std::make_shared<simulated::Mark>();
      mark->set();
      setRecord(*event, std::move(mark), nullptr, {});
    });
  }
  std::shared_ptr<Capture> capture;
  Ends ends;
  if (const auto error = recordEnds(*stream, capture, ends)) return error;
  setRecord(*event, nullptr, std::move(capture), std::move(ends));
  return cudaSuccess;
}

// Checks whether the host may wait for the event or ask about it.
cudaError_t refuseHost(Event& event, const char* function) {
  if (unloading()) return failed(cudaErrorCudartUnloading, function);
  if (const auto error = refuseUnsafe(function)) return error;
  std::shared_ptr<Capture> capture;
  {
    const std::lock_guard lock(event.mutex);
    capture = event.capture;
  }
  return capture ? refuseEvent(capture, function) : cudaSuccess;
}

}  // namespace

}  // namespace emulated

using namespace emulated;

EMULATED_API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return create(event, cudaEventDefault, __func__);
}

EMULATED_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return create(event, flags, __func__);
}

// "An event may be destroyed before it is complete ... the call does not block".
EMULATED_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  calledDriver(__func__);
  if (unloading()) return failed(cudaErrorCudartUnloading, __func__);
  const std::lock_guard lock(events().mutex);
  return events().alive.erase(handle) != 0 ? cudaSuccess : notAnEvent(__func__);
}

EMULATED_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return record(event, stream, cudaEventRecordDefault, __func__);
}

EMULATED_API cudaError_t
cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return record(event, stream, flags, __func__);
}

EMULATED_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  calledDriver(__func__);
  const auto event = findEvent(handle);
  if (event == nullptr) return notAnEvent(__func__);
  if (const auto error = refuseHost(*event, __func__)) return error;
  const auto mark = latest(*event);
  if (mark && !mark->isSet()) return failed(cudaErrorNotReady, __func__);
  return deviceFault();
}

EMULATED_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  calledDriver(__func__);
  const auto event = findEvent(handle);
  if (event == nullptr) return notAnEvent(__func__);
  if (const auto error = refuseHost(*event, __func__)) return error;
  if (const auto mark = latest(*event)) mark->wait();
  return deviceFault();
}

EMULATED_API cudaError_t
cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  calledDriver(__func__);
  const auto first = findEvent(from);
  const auto second = findEvent(to);
  if (first == nullptr || second == nullptr) return notAnEvent(__func__);
  const auto begin = latest(*first);
  const auto end = latest(*second);
  const bool timed = ((first->flags | second->flags) & cudaEventDisableTiming) == 0;
  if (!begin || !end || !timed) return notAnEvent(__func__);
  if (!begin->isSet() || !end->isSet()) return failed(cudaErrorNotReady, __func__);
  using Milliseconds = std::chrono::duration<float, std::milli>;
  *milliseconds = Milliseconds(end->time() - begin->time()).count();
  return cudaSuccess;
}

// Waits for the event's latest record at the time of the call; later records do not matter
// (cudaStreamWaitEvent: "captures in event the contents of ... at the time of this call").
EMULATED_API cudaError_t cudaStreamWaitEvent(cudaStream_t of, cudaEvent_t handle, unsigned flags) {
  calledDriver(__func__);
  if (unloading()) return failed(cudaErrorCudartUnloading, __func__);
  auto* const stream = findStream(of);
  const auto event = findEvent(handle);
  if (stream == nullptr || event == nullptr) return notAnEvent(__func__);
  std::shared_ptr<Capture> capture;
  Ends ends;
  MarkPtr mark;
  {
    const std::lock_guard lock(event->mutex);
    capture = event->capture;
    ends = event->ends;
    mark = event->mark;
  }
  if (capture) return join(*stream, capture, ends);
  if (stream->capturing.load(std::memory_order_acquire)) {
    if ((flags & cudaEventWaitExternal) == 0) return refuseUncaptured(*stream);
    return stream->queue([event] {
      if (const auto now = latest(*event)) now->wait();
    });
  }
  if (mark) stream->wait(std::move(mark));
  return cudaSuccess;
}
