// Memory of the library's own allocator, which torch takes segments of, and
// what of it is registered with communicators.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "nccl/Library.hpp"

namespace torchcomms_pg {

// From now on the exported functions below allocate with the library; once it
// has been called it has an effect no more. Raises LibraryError for one that
// has no allocator, or is another one than before: torch gives back by address
// what it took.
void allocateWith(const Library& library);

// What torch has allocated at once, and divides.
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

  // Does nothing for one that is registered already. `symmetric`: as a window,
  // which is collective.
  ncclResult_t add(ncclComm_t comm, Pool pool, const Segment& segment, bool symmetric);

  // None: nothing of the pool was ever added. It is gone, whatever the library says.
  std::optional<ncclResult_t> remove(Pool pool);
  void removeAll();

  // The communicator is going; with it the library forgets them by itself.
  void forget();

  // Before memory is freed: takes it from all communicators of the process.
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
  std::mutex mutex_;
  std::map<Pool, Entries> pools_;
};

}  // namespace torchcomms_pg

// What torch.cuda.CUDAPluggableAllocator looks up by name. The first gives null
// where memory is short, upon which torch frees what it has in store and tries
// again, and throws what else went wrong.
extern "C" {
__attribute__((visibility("default"))) void* torchcomms_pg_allocate(
    size_t bytes, int device, cudaStream_t stream);
__attribute__((visibility("default"))) void torchcomms_pg_free(
    void* memory, size_t bytes, int device, cudaStream_t stream);
}
