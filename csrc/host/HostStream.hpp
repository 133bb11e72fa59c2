// The object behind a `cudaStream_t` for communication in host memory: an ordered queue of tasks.
#pragma once

#include <nccl.h>

#include <functional>

namespace torchcomms_pg::host {

class HostStream {
 public:
  virtual ~HostStream() = default;

  // Runs `task` after all tasks enqueued before it. Tasks may block; they do not throw.
  virtual void enqueue(std::function<void()> task) = 0;

  // Notifies the stream that an operation has failed. The task that runs the operation calls it.
  virtual void failed() {}

  // Returns whether all tasks have ended and no thread but the caller can enqueue another task.
  virtual bool idle() { return false; }

  // Returns whether the stream records a graph instead of running tasks. If so, keeps `issue`, and
  // each replay calls `issue` in the thread that replays.
  virtual bool capture(const std::function<void()>& /*issue*/) { return false; }

  cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }
  static HostStream* fromHandle(cudaStream_t handle) {
    return reinterpret_cast<HostStream*>(handle);
  }
};

}  // namespace torchcomms_pg::host
