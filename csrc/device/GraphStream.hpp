// The stream of a communicator's asynchronous operations during captures of graphs.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg {

// Owns a stream for operations in graphs alone: while one thread captures, operations that another
// thread issues must not get into the graph. Thread-safe.
class GraphStream {
 public:
  // A stream inside a capture, and the number of that capture, from 1.
  struct Branch {
    c10::Stream stream;
    uint64_t capture;
  };

  GraphStream(AcceleratorDevice& device, bool highPriority)
      : device_(device), highPriority_(highPriority) {}

  // Makes the stream part of the capture of `issuer`. Later work in it waits for all work queued so
  // far in `issuer`. Returns nullopt if streams of this kind of device do not join each other's
  // captures.
  std::optional<Branch> branchFrom(const c10::Stream& issuer);

  // Returns whether the capture is still open.
  bool open(uint64_t capture) const;

  // Keeps `object` until the capture has ended and a later call notices the end.
  void keep(uint64_t capture, std::shared_ptr<const void> object);
  // Drops the objects of captures that have ended. Cheap if nothing is kept.
  void dropEnded();

 private:
  bool openLocked(uint64_t capture) const;

  AcceleratorDevice& device_;
  const bool highPriority_;
  mutable std::mutex mutex_;
  std::optional<c10::Stream> stream_;  // taken with the first capture: torch has few streams
  uint64_t capture_ = 0;               // number of the latest one
  std::vector<std::pair<uint64_t, std::shared_ptr<const void>>> kept_;
  std::atomic<bool> keeps_{false};
};

}  // namespace torchcomms_pg
