// The signals of a communicator that windows have in use.
#pragma once

#include <c10/core/Device.h>

#include <mutex>
#include <vector>

namespace torchcomms_pg {

// The slots of signals. All ranks take them in one order, since they register windows in one.
// Thread-safe.
class SignalSlots {
 public:
  explicit SignalSlots(int count) : used_(count) {}

  // Takes the first free sigIdx. Raises RuntimeError where there is none.
  int take(const c10::Device& device);
  void give(int index);

 private:
  std::mutex mutex_;
  std::vector<bool> used_;  // by sigIdx
};

}  // namespace torchcomms_pg
