#include "comm/SignalSlots.hpp"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torchcomms_pg {

int SignalSlots::take(const c10::Device& device) {
  LockGuard lock(mutex_);
  const auto free = std::find(used_.begin(), used_.end(), false);
  TORCH_CHECK(
      free != used_.end(), "tensor_register: ", used_.size(),
      " windows of this communicator have a tensor registered, which is the most",
      device.is_cpu() ? "" : " on a GPU, since NCCL counts the signals of a communicator together",
      "; deregister one, or make the window on a communicator of split()");
  *free = true;
  return static_cast<int>(free - used_.begin());
}

void SignalSlots::give(int index) {
  LockGuard lock(mutex_);
  used_[index] = false;
}

}  // namespace torchcomms_pg
