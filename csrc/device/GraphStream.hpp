// The stream of a communicator's asynchronous operations inside captures of graphs.
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

// Another stream than that of operations outside graphs: what a thread issues there while another
// one captures must not get into the graph. Thread-safe.
class GraphStream {
 public:
  // A stream inside a capture; `capture`: number of that, from 1.
  struct Branch {
    c10::Stream stream;
    uint64_t capture;
  };

  GraphStream(AcceleratorDevice& device, bool highPriority)
      : device_(device), highPriority_(highPriority) {}

  // Makes the stream part of the capture of `issuer`; what comes next in it waits for what is in
  // `issuer` so far. None: streams of this kind of device do not join each other's captures.
  std::optional<Branch> branchFrom(const c10::Stream& issuer);

  // Returns whether the capture goes on.
  bool open(uint64_t capture) const;

  // Keeps `object` until the capture has ended, as far as later calls show that.
  void keep(uint64_t capture, std::shared_ptr<const void> object);
  // Drops what is kept for captures that have ended. Costs nothing where nothing is kept.
  void dropEnded();

 private:
  bool openLocked(uint64_t capture) const;

  AcceleratorDevice& device_;
  const bool highPriority_;
  mutable std::mutex mutex_;
  std::optional<c10::Stream> stream_;  // taken with the first capture: torch has few
  uint64_t capture_ = 0;               // the latest one
  std::vector<std::pair<uint64_t, std::shared_ptr<const void>>> kept_;
  std::atomic<bool> keeps_{false};
};

}  // namespace torchcomms_pg
