// Streams: queues whose tasks run one after another, each queue on a thread of
// its own (Programming Guide, "Streams": operations in a stream run in issue
// order, those of different streams in any order and concurrently).
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "device/WorkerStream.hpp"
#include "simulated/Delays.hpp"
#include "simulated/Mark.hpp"
#include "simulated/Rest.hpp"

namespace emulated {

class Capture;
using MarkPtr = std::shared_ptr<simulated::Mark>;

class Stream final : public torchcomms_pg::host::HostStream {
 public:
  // Makes a stream. `flags`: as cudaStreamCreateWithFlags takes them.
  Stream(int device, unsigned flags, int priority, bool legacy = false);

  // Queues a kernel or a copy: it runs after what was queued before, or becomes part of the graph
  // that the stream captures, and then runs with each replay.
  cudaError_t queue(std::function<void()> task);
  void enqueue(std::function<void()> task) override;  // by csrc/shm
  bool capture(const std::function<void()>& issue) override;

  // Adds a task past any capture.
  void add(std::function<void()> task, bool delayed = true);
  MarkPtr record();
  void wait(MarkPtr mark);
  bool waits() { return wait_.lasts(); }

  // Queues a function of the host. The stream is at rest in it: a test's waits for the test.
  cudaError_t queueHost(std::function<void()> function);

  bool idle() const { return pending_.load(std::memory_order_acquire) == 0; }
  void synchronize();

  int device() const { return device_; }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }
  bool legacy() const { return legacy_; }

  // The stream's capture, guarded by the captures' lock (Captures.cpp). The flag tells without the
  // lock whether there is one.
  std::shared_ptr<Capture> captured;
  std::atomic<bool> capturing{false};

 private:
  void post(std::function<void()> task, bool delayed);
  void orderWithLegacy();

  const int device_;
  const unsigned flags_;
  const int priority_;
  const bool legacy_;
  std::atomic<int64_t> pending_{0};
  std::mutex mutex_;
  std::condition_variable done_;
  simulated::Wait wait_;
  simulated::Dawdler dawdler_;
  torchcomms_pg::WorkerStream worker_;
};

// Returns the stream of a handle; null for an invalid or destroyed one. A null handle stands for
// the legacy default stream of the current device.
Stream* findStream(cudaStream_t handle);

void synchronizeDevice(int device);

// Returns cudaErrorLaunchFailure once a task has raised. "This leaves the process in an
// inconsistent state and any further CUDA work will return the same error" (Runtime API, "Data
// types used by CUDA Runtime", cudaErrorLaunchFailure).
cudaError_t deviceFault();

// Redirects into this stream, while it lives, what the thread queues in any stream: for the replay
// of a graph.
class Redirect {
 public:
  explicit Redirect(Stream& to);
  ~Redirect();
  Redirect(const Redirect&) = delete;
  Redirect& operator=(const Redirect&) = delete;
};

}  // namespace emulated
