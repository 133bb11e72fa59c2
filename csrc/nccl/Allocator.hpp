// Memory that libnccl allocates for torch's allocator, and its registration with communicators.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "base/Mutex.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

class Libnccl;

// Makes the exported functions below allocate with the library, for the rest of the process. Raises
// LibraryError if the library has no allocator, or differs from the library of an earlier call:
// torch frees memory by its address, from which the library cannot be told.
void allocateWith(const Libnccl& library);

// A block that torch has allocated in one piece and divides among tensors.
struct PoolSegment {
  void* address;
  size_t bytes;
};

// The memory that is registered with one communicator, by pool. Thread-safe.
class Registrations {
 public:
  // torch's id of a pool, two numbers.
  using Pool = std::pair<uint64_t, uint64_t>;

  explicit Registrations(const Library& library);
  ~Registrations();
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // Registers a segment unless it is registered with equal arguments, and returns NCCL's result. A
  // `symmetric` segment is registered as a window, by a collective call.
  ncclResult_t add(ncclComm_t comm, Pool pool, const PoolSegment& segment, bool symmetric);

  // Deregisters a pool, and forgets it even after an error. Returns NCCL's first error or
  // ncclSuccess, or nullopt if the pool is unknown or removed.
  std::optional<ncclResult_t> remove(Pool pool);
  void removeAll();

  // Forgets all entries without deregistering them, for a communicator whose end deregisters them.
  void forget();

  // Deregisters the memory from all communicators of the process. Call before the memory is freed.
  static void released(void* address);

 private:
  struct Entry {
    ncclComm_t comm;
    size_t bytes;
    bool symmetric;
    void* handle;
    ncclWindow_t window;
  };
  using Entries = std::map<void*, Entry>;

  ncclResult_t deregister(const Entry& entry) const;
  ncclResult_t clear(Entries& entries) const;

  const Library& library_;
  // Held during a registration, which may wait for other ranks. A thread that frees memory locks
  // only mutex_, and so never waits for other ranks.
  Mutex adding_ ACQUIRED_BEFORE(mutex_);
  Mutex mutex_;
  std::map<Pool, Entries> pools_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg

// Functions that torch.cuda.CUDAPluggableAllocator looks up by name. torchcomms_pg_allocate()
// returns null if memory is short: torch then frees cached memory and retries. Throws other errors.
extern "C" {
__attribute__((visibility("default"))) void* torchcomms_pg_allocate(
    size_t bytes, int device, cudaStream_t stream);
__attribute__((visibility("default"))) void torchcomms_pg_free(
    void* memory, size_t bytes, int device, cudaStream_t stream);
}
