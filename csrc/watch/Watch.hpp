// Watches process groups of any backend by the hooks that c10d has on their operations.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/AtomicShared.hpp"
#include "base/TorchCompat.hpp"
#include "watch/WatchedGroup.hpp"

namespace torchcomms_pg {

// The watch over one process group, which lives as long as the group, or until it is closed. It
// does not change the group's operations. Thread-safe.
class Watch : public std::enable_shared_from_this<Watch> {
 public:
  // Watches the operations of `group` on these types of devices from the next one on. `ranks`:
  // global ranks. In a group of one rank or without a store, records the operations and reports
  // nothing. Call once for each group, before or between its operations. Raises the store's errors.
  static std::shared_ptr<Watch> begin(
      c10d::ProcessGroup& group,
      const std::vector<int64_t>& ranks,
      const std::vector<c10::DeviceType>& types,
      Milliseconds timeout);

  ~Watch() { close(); }

  void setTimeout(Milliseconds timeout);
  // Returns how late each rank is, from the operations on the CPU, see LatenessClient::ask.
  Lateness lateness(const char* operation) const;
  // Forgets the group, which is being destroyed. Idempotent.
  void close();

 private:
  // A type of device, and the group's part for it.
  struct Part {
    std::weak_ptr<WatchedGroup> group;  // null once the watch is closed
    c10::DeviceType type;
    bool told = false;  // the backend reports completions
    bool fake = false;  // nothing is sent: operations end with their calls
  };

  void before(const latest::PreHookArgs& args);
  void after(const latest::PostHookArgs& args);

  using Groups = std::vector<std::shared_ptr<WatchedGroup>>;

  std::vector<Part> parts_;  // the first serves operations without tensors
  // Keeps the groups of the parts. Null once closed.
  AtomicShared<const Groups> groups_;
};

}  // namespace torchcomms_pg
