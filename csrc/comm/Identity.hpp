// Who a communicator is: which rank of which group, on which device.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "operation/Group.hpp"

namespace torchcomms_pg {

// The part of a communicator that never changes, but for the group's description. As the base of
// Communicator it lives as long as that, so it also stands for the communicator's life.
class Identity : public std::enable_shared_from_this<Identity> {
 public:
  // The device of the tensors. `highPriority`: whether an accelerator's streams have high priority.
  // `pair`: the two ranks of the group that this communicator connects, for messages between them;
  // empty if it connects all ranks.
  struct Place {
    c10::Device device{c10::DeviceType::CPU};
    bool highPriority = false;
    std::vector<int> pair = {};
  };

  Identity(const Identity&) = delete;
  Identity& operator=(const Identity&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Group& group() const { return group_; }
  const c10::Device& device() const { return place_.device; }
  const std::vector<int>& pair() const { return place_.pair; }
  // Returns the ranks' numbers in the default group, by rank; the rank itself if unknown.
  std::vector<int64_t> globalRanks() const { return group_.ranks(size_); }
  // Returns the ranks that this communicator connects.
  std::vector<int> members() const {
    auto ranks = pair();
    for (int rank = 0; pair().empty() && rank < size_; ++rank) {
      ranks.push_back(rank);
    }
    return ranks;
  }
  // Returns the rank's number in the library's communicator.
  int inLibrary(int rank) const {
    return pair().empty() ? rank : static_cast<int>(rank == pair().back());
  }
  // Returns whether operations are queued on the device. If so, no thread is in the library while
  // they run, and so no thread sees the library fail.
  bool queues() const { return !device().is_cpu(); }

  // Returns an object that keeps the communicator alive.
  std::shared_ptr<const void> keepAlive() const { return shared_from_this(); }

 protected:
  Identity(int rank, int size, Group group, Place place)
      : rank_(rank), size_(size), place_(std::move(place)), group_(std::move(group)) {}
  ~Identity() = default;

  const int rank_;
  const int size_;
  const Place place_;
  Group group_;
};

}  // namespace torchcomms_pg
