// Watches process groups of any backend through c10d's hooks on their operations.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "base/AtomicShared.hpp"
#include "base/TorchCompat.hpp"
#include "diagnosis/watch/WatchedGroup.hpp"

namespace torchcomms_pg {

// Watches one process group until the group ends or the watch is closed. Does not change the
// group's operations. Thread-safe.
class Watch : public std::enable_shared_from_this<Watch> {
 public:
  // Watches the operations of `group` on these types of devices, from the next operation on.
  // `ranks`: global ranks. If the group has one rank or no store, only records its operations. Call
  // it once for each group, before or between its operations. Raises the store's errors.
  static std::shared_ptr<Watch> begin(
      c10d::ProcessGroup& group, const std::vector<int64_t>& ranks,
      const std::vector<c10::DeviceType>& types, Milliseconds timeout);

  ~Watch() { close(); }

  void setTimeout(Milliseconds timeout);
  // Returns how late each rank is, by its operations on the CPU, see LatenessClient::ask. Raises
  // std::runtime_error if the group has no part for the CPU.
  Lateness lateness(const char* operation) const;
  // Ends the watch, since the group is being destroyed. Idempotent.
  void close();

  // Call when the calling thread has left calls by an exception that ends the program. Makes the
  // groups of these calls say why the operations have failed.
  static void failCalls() noexcept;

 private:
  void before(const latest::PreHookArgs& args);
  void after(const latest::PostHookArgs& args);

  using Groups = std::vector<std::shared_ptr<WatchedGroup>>;

  // The group's parts, each for one type of device; the first serves operations without tensors.
  std::vector<std::weak_ptr<WatchedGroup>> parts_;
  // Keeps the groups of all parts alive. Null once the watch is closed.
  AtomicShared<const Groups> groups_;
};

}  // namespace torchcomms_pg
