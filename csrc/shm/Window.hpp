// Windows: memory of each rank to which its peers write, without any call of that rank.
#pragma once

#include <nccl.h>

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "nccl/Library.hpp"
#include "nccl/NcclApi.hpp"
#include "shm/segment/MappableMemory.hpp"

namespace torchcomms_pg::shm {

class Comm;

// One rank's mappings of all ranks' memory in one window, by rank. Never changes.
using MappedWindow = std::vector<WindowView>;

// Value of sigIdx with which a putSignal sends no signal. NCCL has no such value.
inline constexpr int kNoSignal = -1;

// A put of data into a peer's window, a signal to the peer, or a put and then a signal.
struct Put {
  int peer = 0;
  std::shared_ptr<const MappedWindow> window{};  // null if no data is put
  size_t offset = 0;                             // in the peer's window, in bytes
  const void* data = nullptr;
  size_t bytes = 0;
  int signal = kNoSignal;
};

// The signals for which one call waits.
struct AwaitedSignals {
  int peer;
  int signal;
  uint64_t count;  // to wait for; Windows::expect() makes it the total since the first signal
};
using SignalWait = std::vector<AwaitedSignals>;

// The windows of one communicator, and the signals for which this rank waits. Thread-safe.
class Windows {
 public:
  explicit Windows(Comm& comm) : comm_(comm) {}

  // Makes a window of `bytes` bytes at `buffer`, which is part of `memory`; `memory` is null for 0
  // bytes. All ranks call it. Blocks until every rank has mapped the memory of all
  // others. Throws NcclError.
  ncclWindow_t add(void* buffer, size_t bytes, const std::shared_ptr<Memory>& memory);
  // Removes the window on this rank; the peers' mappings stay valid. Throws NcclError.
  void remove(ncclWindow_t handle);
  std::shared_ptr<const MappedWindow> find(ncclWindow_t handle, const char* operation) const;

  // Reserves the peers' next signals for `wait`: waits get signals in the order of these calls.
  void expect(SignalWait& wait);

  // Execute a put or a wait in the calling thread. Throw NcclError.
  void run(const Put& put);
  void run(const SignalWait& wait);  // call after expect(); blocks

  // Returns a window of any communicator of this process, or throws NcclError.
  static std::shared_ptr<const MappedWindow> findAnywhere(
      ncclWindow_t handle, const char* operation);

  // Returns the peers for whose signals threads wait.
  std::vector<int> missingRanks() const;

 private:
  Comm& comm_;
  mutable Mutex mutex_;
  std::map<uintptr_t, std::shared_ptr<const MappedWindow>> windows_ GUARDED_BY(mutex_);
  // Number of signals that waits have reserved so far, by peer and sigIdx.
  std::map<std::pair<int, int>, uint64_t> taken_ GUARDED_BY(mutex_);
  std::multiset<int> awaited_ GUARDED_BY(mutex_);  // the peer of each waiting thread
};

// Adds NCCL's functions for windows to the table.
void addWindows(NcclApi& table);

}  // namespace torchcomms_pg::shm
