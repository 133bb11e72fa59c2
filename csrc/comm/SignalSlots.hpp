// The signals of a communicator that windows have in use.
#pragma once

#include <c10/core/Device.h>

#include <mutex>
#include <vector>

namespace torchcomms_pg {

// Thread-safe. Slots are taken in one order on all ranks, since windows are registered in one.
class SignalSlots {
 public:
  explicit SignalSlots(int count) : used_(count) {}

  // The first free sigIdx. Raises RuntimeError where there is none.
  int take(const c10::Device& device);
  void give(int index);

 private:
  std::mutex mutex_;
  std::vector<bool> used_;  // by sigIdx
};

}  // namespace torchcomms_pg
