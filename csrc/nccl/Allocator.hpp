// Memory of the library's own allocator, which serves torch's segments, and its registration with
// communicators.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "nccl/Library.hpp"

namespace torchcomms_pg {

class Libnccl;

// Makes the exported functions below allocate with the library, for the rest of the process. Raises
// LibraryError if the library has no allocator or differs from the library of an earlier call:
// torch frees memory by address alone, which does not show the library.
void allocateWith(const Libnccl& library);

// A block that torch has allocated in one piece and subdivides.
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

  // Registers a segment unless it is registered already. A `symmetric` segment is registered as a
  // window, which is collective.
  ncclResult_t add(ncclComm_t comm, Pool pool, const PoolSegment& segment, bool symmetric);

  // Deregisters a pool, and forgets it whatever the library returns. Returns nullopt if nothing of
  // the pool was ever added.
  std::optional<ncclResult_t> remove(Pool pool);
  void removeAll();

  // Forgets all entries: the communicator is about to end, and the library then drops them.
  void forget();

  // Deregisters the memory from all communicators of the process. Call before it is freed.
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
  void drop(void* address);

  const Library& library_;
  // Held during a registration, which may wait for other ranks. Locked before mutex_. Freeing
  // memory takes only mutex_, since it must not wait for other ranks.
  std::mutex adding_;
  std::mutex mutex_;
  std::map<Pool, Entries> pools_;
};

}  // namespace torchcomms_pg

// Functions that torch.cuda.CUDAPluggableAllocator looks up by name. The first returns null if
// memory is short, upon which torch frees its cached memory and tries again, and throws for other
// errors.
extern "C" {
__attribute__((visibility("default"))) void* torchcomms_pg_allocate(
    size_t bytes, int device, cudaStream_t stream);
__attribute__((visibility("default"))) void torchcomms_pg_free(
    void* memory, size_t bytes, int device, cudaStream_t stream);
}
