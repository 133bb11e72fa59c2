// Memory of the library's own allocator, from which torch takes segments, and its registration with
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

// Makes the exported functions below allocate with the library, for the rest of the process. Raises
// LibraryError for a library that has no allocator, or differs from that of an earlier call: torch
// gives memory back by address.
void allocateWith(const Library& library);

// A block that torch has allocated at once, and divides.
struct Segment {
  void* address;
  size_t bytes;
};

// The memory that is registered with one communicator, by pool. Thread-safe.
class Registrations {
 public:
  // The two numbers of torch's pool.
  using Pool = std::pair<uint64_t, uint64_t>;

  explicit Registrations(const NcclApi& api);
  ~Registrations();
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // Registers a segment, unless it is registered already. `symmetric`: as a window, which is
  // collective.
  ncclResult_t add(ncclComm_t comm, Pool pool, const Segment& segment, bool symmetric);

  // Deregisters a pool, which is gone whatever the library says. None: nothing of it was ever
  // added.
  std::optional<ncclResult_t> remove(Pool pool);
  void removeAll();

  // Forgets all entries: the communicator is going, and the library forgets them with it.
  void forget();

  // Takes the memory from all communicators of the process. Call before it is freed.
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

  const NcclApi& api_;
  // Held while memory is registered, which may wait for other ranks: a rank that frees memory
  // meanwhile must not wait for that. Taken before mutex_.
  std::mutex adding_;
  std::mutex mutex_;
  std::map<Pool, Entries> pools_;
};

}  // namespace torchcomms_pg

// Functions that torch.cuda.CUDAPluggableAllocator looks up by name. The first gives null if memory
// is short, upon which torch frees what it has in store and tries again, and throws at other
// errors.
extern "C" {
__attribute__((visibility("default"))) void* torchcomms_pg_allocate(
    size_t bytes, int device, cudaStream_t stream);
__attribute__((visibility("default"))) void torchcomms_pg_free(
    void* memory, size_t bytes, int device, cudaStream_t stream);
}
