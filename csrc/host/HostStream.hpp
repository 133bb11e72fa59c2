// The object behind a `cudaStream_t` when the communication happens in host memory: an ordered
// queue of tasks.
#pragma once

#include <nccl.h>

#include <functional>

namespace torchcomms_pg::host {

class HostStream {
 public:
  virtual ~HostStream() = default;

  // Runs `task` after all tasks enqueued before it. Tasks may block; they do
  // not throw.
  virtual void enqueue(std::function<void()> task) = 0;

  // Tells the stream, in a task of it, that the operation which this runs has failed.
  virtual void failed() {}

  // Returns whether all its tasks have ended, and only the caller can enqueue another.
  virtual bool idle() { return false; }

  // Keeps `issue` while the stream records a graph instead of running, and returns true; each
  // replay then calls `issue`, from the thread that replays.
  virtual bool capture(const std::function<void()>& issue) {
    static_cast<void>(issue);
    return false;
  }

  cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }
  static HostStream* fromHandle(cudaStream_t handle) {
    return reinterpret_cast<HostStream*>(handle);
  }
};

}  // namespace torchcomms_pg::host
