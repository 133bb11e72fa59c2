// Windows: memory of each rank that its peers write without the rank's taking part.
#pragma once

#include <nccl.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "nccl/Library.hpp"
#include "nccl/NcclApi.hpp"
#include "shm/OneSided.hpp"
#include "shm/segment/MappableMemory.hpp"

namespace torchcomms_pg::shm {

class Comm;

// One window as one rank sees it. Immutable once made.
struct MappedWindow {
  std::vector<WindowView> views;  // by rank
};

// The windows of one communicator, and the signals that this rank has waited for. Thread-safe.
class Windows {
 public:
  explicit Windows(Comm& comm) : comm_(comm) {}

  // Makes a window. Collective, called in a Comm::Turn. Blocks until every rank has mapped the
  // memory of all others. `buffer` is part of `memory`. Throws NcclError.
  ncclWindow_t add(void* buffer, size_t bytes, const std::shared_ptr<Memory>& memory);
  // Removes the window on this rank; the peers' mappings stay valid. Throws NcclError.
  void remove(ncclWindow_t handle);
  std::shared_ptr<const MappedWindow> find(ncclWindow_t handle, const char* operation) const;

  // Assigns the peers' next signals to `wait`: waits are satisfied in the order of these calls.
  void expect(SignalWait& wait);

  // Execute in the calling thread; throw NcclError.
  void run(const Put& put);
  void run(const SignalWait& wait);  // after expect(); blocks

  // Returns a window of any communicator of this process.
  static std::shared_ptr<const MappedWindow> findAnywhere(
      ncclWindow_t handle, const char* operation);

  // Returns the peers that threads are waiting for.
  std::vector<int> missingRanks() const;

 private:
  Comm& comm_;
  mutable std::mutex mutex_;  // guards the members below
  std::map<uintptr_t, std::shared_ptr<const MappedWindow>> windows_;
  std::map<std::pair<int, int>, uint64_t> taken_;  // number expected so far, by peer and signal
  std::multiset<int> awaited_;                     // peers that threads wait for
};

// Adds NCCL's functions for windows to the table.
void addWindows(NcclApi& table);

}  // namespace torchcomms_pg::shm
