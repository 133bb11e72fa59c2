// The stream of a communicator's asynchronous operations while a graph is captured.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg {

// Owns a stream that only captured operations use. The communicator's normal stream does not join
// captures: operations that another thread issues in it meanwhile would get into the graph.
// Thread-safe.
class GraphStream {
 public:
  // A stream that a graph captures, and the number of the capture, from 1.
  struct Branch {
    c10::Stream stream;
    uint64_t capture;
  };

  GraphStream(AcceleratorDevice& device, bool highPriority)
      : device_(device), highPriority_(highPriority) {}

  // Makes the stream join the capture of `issuer`, and returns the stream. Later work in the stream
  // waits for all work queued so far in `issuer`. Returns nullopt except for CUDA: streams of other
  // devices do not join each other's captures.
  std::optional<Branch> branchFrom(const c10::Stream& issuer);

  // Returns whether the capture is still open.
  bool open(uint64_t capture) const;

  // Keeps `object` until the first dropEnded() after the end of the capture.
  void keep(uint64_t capture, std::shared_ptr<const void> object);
  // Drops the objects of captures that have ended. Cheap if nothing is kept.
  void dropEnded();

 private:
  bool openLocked(uint64_t capture) const REQUIRES(mutex_);

  AcceleratorDevice& device_;
  const bool highPriority_;
  mutable Mutex mutex_;
  // nullopt until the first capture: torch has few streams.
  std::optional<c10::Stream> stream_ GUARDED_BY(mutex_);
  uint64_t capture_ GUARDED_BY(mutex_) = 0;  // number of the latest capture
  std::vector<std::pair<uint64_t, std::shared_ptr<const void>>> kept_ GUARDED_BY(mutex_);
  std::atomic<bool> keeps_{false};
};

}  // namespace torchcomms_pg
