// Captures: streams that record a graph instead of running, the calls that are allowed meanwhile,
// and the effect of a violation (Programming Guide, "Creating a Graph Using Stream Capture").
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "libcudart/Graphs.hpp"

namespace emulated {

class Stream;

// The ends of a stream or an event inside a capture: what comes next depends on them.
using Ends = std::set<size_t>;

class Capture {
 public:
  Capture(Stream& origin, cudaStreamCaptureMode mode);

  const unsigned long long id;
  const cudaStreamCaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();
  Stream& origin;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();  // null once it is over: events stay
  std::map<Stream*, Ends> ends;                              // of the streams that take part
  bool invalid = false;

  bool over() const { return graph == nullptr; }
};

// Each function returns cudaSuccess if the call may go on; else it has invalidated the captures in
// question and returns the error.
//
// Checks a call that a capture in this or another thread may forbid. Runtime API,
// cudaThreadExchangeStreamCaptureMode: a thread in global mode may not make one while it or, in
// global mode, another thread captures; in thread-local mode while it captures itself; captures
// begun in relaxed mode forbid nothing in their thread, and a thread in relaxed mode is forbidden
// nothing.
cudaError_t refuseUnsafe(const char* function);
// Checks a call that waits for the stream or asks for its state ("It is invalid to synchronize or
// query the execution status of a stream which is being captured").
cudaError_t refuseCaptured(Stream& stream, const char* function);
// Checks work in the legacy stream while a blocking stream captures ("any attempted use of the
// legacy stream is invalid").
cudaError_t refuseImplicit(Stream& stream, const char* function);

// Adds a node to a stream that captures; cudaErrorStreamCaptureInvalidated if the capture has been
// invalidated.
cudaError_t addNode(Stream& stream, Node node);

// Records the capture of a stream that captures, and its ends, for an event.
cudaError_t recordEnds(Stream& stream, std::shared_ptr<Capture>& capture, Ends& ends);
// Makes the stream, if it does not capture yet, take part in the capture of an
// event ("Cross-stream Dependencies and Events").
cudaError_t join(Stream& stream, const std::shared_ptr<Capture>& capture, const Ends& ends);
// Check an event that was not captured, which `stream` is to wait for, or an event that was and is
// to be asked or waited for by the host.
cudaError_t refuseUncaptured(Stream& stream);
cudaError_t refuseEvent(const std::shared_ptr<Capture>& capture, const char* function);

}  // namespace emulated
