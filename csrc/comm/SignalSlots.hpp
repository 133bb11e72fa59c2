// The signals of a communicator that its windows use.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "base/Mutex.hpp"

namespace torchcomms_pg {

// Allocates signals. All ranks allocate them in the same order, since they register windows in the
// same order. Thread-safe.
class SignalSlots {
 public:
  explicit SignalSlots(int count) : used_(count) {}

  // Takes and returns the first free sigIdx. Raises RuntimeError if none is free.
  int take(const c10::Device& device);
  void give(int index);

 private:
  Mutex mutex_;
  std::vector<bool> used_ GUARDED_BY(mutex_);  // whether it is taken, by sigIdx
};

}  // namespace torchcomms_pg
