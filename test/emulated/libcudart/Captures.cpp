#include "libcudart/Captures.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <utility>
#include <vector>

#include "libcudart/Calls.hpp"
#include "libcudart/Devices.hpp"
#include "libcudart/Emulated.hpp"
#include "libcudart/Streams.hpp"

namespace emulated {

namespace {

std::mutex capturesMutex;  // of all captures, and of what the streams say of them
std::vector<std::shared_ptr<Capture>> captures;
std::atomic<size_t> capturesNow{0};
std::atomic<unsigned long long> capturesMade{0};

thread_local cudaStreamCaptureMode threadMode = cudaStreamCaptureModeGlobal;

const char* modeName(cudaStreamCaptureMode mode) {
  switch (mode) {
    case cudaStreamCaptureModeGlobal: return "global";
    case cudaStreamCaptureModeThreadLocal: return "thread-local";
    default: return "relaxed";
  }
}

// "When an invalid operation is attempted during stream capture, any associated capture
// graphs are invalidated" ("Invalidation"). Said aloud: torch reports it far from its cause.
void invalidate(Capture& capture, const char* function) {
  if (!capture.invalid) {
    std::fprintf(
        stderr, "emulated: %s: %s has invalidated capture %llu (%s mode)\n", threadName().c_str(),
        function, capture.id, modeName(capture.mode));
  }
  capture.invalid = true;
}

cudaStreamCaptureStatus statusOf(const Stream& stream) {
  if (!stream.captured) return cudaStreamCaptureStatusNone;
  return stream.captured->invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
}

bool isBlocking(const Stream& stream) {
  return (stream.flags() & cudaStreamNonBlocking) == 0;
}

}  // namespace

Capture::Capture(Stream& origin, cudaStreamCaptureMode mode)
    : id(++capturesMade), mode(mode), origin(origin) {
  graph->origin = &origin;
  ends[&origin];
}

cudaError_t refuseUnsafe(const char* function) {
  if (capturesNow.load(std::memory_order_acquire) == 0) return cudaSuccess;
  if (threadMode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool forbidden = false;
  const std::lock_guard lock(capturesMutex);
  for (const auto& capture : captures) {
    const bool forbids = capture->thread == std::this_thread::get_id()
                             ? capture->mode != cudaStreamCaptureModeRelaxed
                             : capture->mode == cudaStreamCaptureModeGlobal &&
                                   threadMode == cudaStreamCaptureModeGlobal;
    if (!forbids) continue;
    forbidden = true;
    invalidate(*capture, function);
  }
  return forbidden ? failed(cudaErrorStreamCaptureUnsupported, function) : cudaSuccess;
}

cudaError_t refuseCaptured(Stream& stream, const char* function) {
  if (const auto error = refuseImplicit(stream, function)) return error;
  if (!stream.capturing.load(std::memory_order_acquire)) return cudaSuccess;
  const std::lock_guard lock(capturesMutex);
  if (!stream.captured) return cudaSuccess;
  invalidate(*stream.captured, function);
  return failed(cudaErrorStreamCaptureUnsupported, function);
}

cudaError_t refuseImplicit(Stream& stream, const char* function) {
  if (!stream.legacy() || capturesNow.load(std::memory_order_acquire) == 0) return cudaSuccess;
  bool forbidden = false;
  const std::lock_guard lock(capturesMutex);
  for (const auto& capture : captures) {
    for (const auto& [other, ends] : capture->ends) {
      if (other->device() != stream.device() || !isBlocking(*other)) continue;
      forbidden = true;
      invalidate(*capture, function);
    }
  }
  return forbidden ? failed(cudaErrorStreamCaptureImplicit, function) : cudaSuccess;
}

cudaError_t addNode(Stream& stream, Node node) {
  const std::lock_guard lock(capturesMutex);
  const auto& capture = stream.captured;
  if (!capture || capture->invalid) {
    return failed(cudaErrorStreamCaptureInvalidated, "work in a capture");
  }
  auto& ends = capture->ends[&stream];
  node.stream = &stream;
  node.after.assign(ends.begin(), ends.end());
  capture->graph->nodes.push_back(std::move(node));
  ends = {capture->graph->nodes.size() - 1};
  return cudaSuccess;
}

cudaError_t recordEnds(Stream& stream, std::shared_ptr<Capture>& capture, Ends& ends) {
  const std::lock_guard lock(capturesMutex);
  if (!stream.captured || stream.captured->invalid) {
    return failed(cudaErrorStreamCaptureInvalidated, "an event of a capture");
  }
  capture = stream.captured;
  ends = capture->ends[&stream];
  return cudaSuccess;
}

cudaError_t join(Stream& stream, const std::shared_ptr<Capture>& capture, const Ends& ends) {
  const std::lock_guard lock(capturesMutex);
  if (capture->over()) return failed(cudaErrorCapturedEvent, "its capture has ended");
  if (capture->invalid) return failed(cudaErrorStreamCaptureInvalidated, "cudaStreamWaitEvent");
  if (stream.captured && stream.captured != capture) {
    invalidate(*capture, "a wait for the event of another capture");
    invalidate(*stream.captured, "a wait for the event of another capture");
    return failed(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
  }
  if (!stream.captured) {
    if (stream.legacy()) {
      invalidate(*capture, "the default stream in a capture");
      return failed(cudaErrorStreamCaptureUnsupported, "cudaStreamWaitEvent");
    }
    stream.captured = capture;
    stream.capturing.store(true, std::memory_order_release);
  }
  capture->ends[&stream].insert(ends.begin(), ends.end());
  return cudaSuccess;
}

cudaError_t refuseUncaptured(Stream& stream) {
  const std::lock_guard lock(capturesMutex);
  if (!stream.captured) return cudaSuccess;
  invalidate(*stream.captured, "a wait for an event from outside");
  return failed(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
}

cudaError_t refuseEvent(const std::shared_ptr<Capture>& capture, const char* function) {
  const std::lock_guard lock(capturesMutex);
  if (!capture->over()) invalidate(*capture, function);
  return failed(cudaErrorCapturedEvent, function);
}

cudaStreamCaptureStatus captureStatus(cudaStream_t handle) {
  auto* const stream = findStream(handle);
  const std::lock_guard lock(capturesMutex);
  return stream == nullptr ? cudaStreamCaptureStatusNone : statusOf(*stream);
}

bool keepWithGraph(cudaStream_t handle, std::shared_ptr<void> object) {
  auto* const stream = findStream(handle);
  if (stream == nullptr || !stream->capturing.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(capturesMutex);
  if (!stream->captured) return false;
  stream->captured->graph->kept.push_back(std::move(object));
  return true;
}

}  // namespace emulated

using namespace emulated;

namespace {

// Returns whether all nodes lead to the ends of the origin. Node-wise: those "unreachable from the
// stream at cudaStreamEndCapture" are what is unjoined (Runtime API,
// cudaStreamUpdateCaptureDependencies), so a stream that only waited need not come back.
bool allJoined(const Capture& capture) {
  const auto& nodes = capture.graph->nodes;
  std::vector<bool> reached(nodes.size(), false);
  for (const auto end : capture.ends.at(&capture.origin)) reached[end] = true;
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!reached[i]) return false;
    for (const auto before : nodes[i].after) reached[before] = true;
  }
  return true;
}

}  // namespace

// ---------------------------------------------------------------- Runtime API, "Stream Management"

EMULATED_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  calledDriver(__func__);
  needContext(
      __func__);  // pytorch/pytorch#148594: on the current device, which may be the wrong one
  std::swap(*mode, threadMode);
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  calledDriver(__func__);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle, __func__);
  if (stream->legacy()) return failed(cudaErrorStreamCaptureUnsupported, "the default stream");
  const std::lock_guard lock(capturesMutex);
  if (stream->captured) return failed(cudaErrorIllegalState, "the stream captures already");
  auto capture = std::make_shared<Capture>(*stream, mode);
  stream->captured = capture;
  stream->capturing.store(true, std::memory_order_release);
  captures.push_back(std::move(capture));
  capturesNow.store(captures.size(), std::memory_order_release);
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  calledDriver(__func__);
  *graph = nullptr;
  auto* const stream = findStream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle, __func__);
  const std::lock_guard lock(capturesMutex);
  const auto capture = stream->captured;
  if (!capture) return failed(cudaErrorIllegalState, "the stream captures nothing");
  if (&capture->origin != stream) {
    invalidate(*capture, "its end in a stream that did not begin it");
    return failed(cudaErrorStreamCaptureUnmatched, __func__);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    invalidate(*capture, "its end in a thread that did not begin it");
    return failed(cudaErrorStreamCaptureWrongThread, __func__);
  }
  for (const auto& [other, ends] : capture->ends) {
    other->captured = nullptr;
    other->capturing.store(false, std::memory_order_release);
  }
  std::erase(captures, capture);
  capturesNow.store(captures.size(), std::memory_order_release);
  const bool joined = allJoined(*capture);
  const auto recorded = std::exchange(capture->graph, nullptr);
  if (capture->invalid || !joined) {
    withdraw(recorded);
    return failed(
        capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined,
        __func__);
  }
  const auto& last = capture->ends.at(stream);
  recorded->last.assign(last.begin(), last.end());
  *graph = publish(recorded);
  return cudaSuccess;
}

EMULATED_API cudaError_t
cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  calledDriver(__func__);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle, __func__);
  if (const auto error = refuseImplicit(*stream, __func__)) return error;
  const std::lock_guard lock(capturesMutex);
  *status = statusOf(*stream);
  return cudaSuccess;
}

// Leaves out the nodes: a caller that wants to change a graph while it is captured cannot.
EMULATED_API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
    size_t* count) {
  calledDriver(__func__);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle, __func__);
  if (const auto error = refuseImplicit(*stream, __func__)) return error;
  const std::lock_guard lock(capturesMutex);
  *status = statusOf(*stream);
  if (id != nullptr) *id = stream->captured ? stream->captured->id : 0;
  if (graph != nullptr) *graph = stream->captured ? publish(stream->captured->graph) : nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
