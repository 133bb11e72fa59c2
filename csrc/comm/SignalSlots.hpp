// The signals of a communicator that its windows use.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "base/Mutex.hpp"

namespace torchcomms_pg {

// Allocates signals. All ranks allocate them in the same order, since they register windows in the
// same order. Thread-safe.
class SignalSlots {
 public:
  explicit SignalSlots(int count) : used_(count) {}

  // Takes and returns the first free sigIdx. Raises RuntimeError if none is free.
  int take(const c10::Device& device) {
    LockGuard lock(mutex_);
    const auto free = std::find(used_.begin(), used_.end(), false);
    TORCH_CHECK(
        free != used_.end(), "tensor_register: ", used_.size(),
        " windows of this communicator have a tensor registered, which is the most",
        device.is_cpu() ? ""
                        : " on a GPU, since NCCL counts the signals of a communicator together",
        "; deregister one, or make the window on a communicator of split()");
    *free = true;
    return static_cast<int>(free - used_.begin());
  }
  void give(int index) {
    LockGuard lock(mutex_);
    used_[index] = false;
  }

 private:
  Mutex mutex_;
  std::vector<bool> used_ GUARDED_BY(mutex_);  // whether it is taken, by sigIdx
};

}  // namespace torchcomms_pg
