#include "nccl/Allocator.hpp"

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/NeverDestroyed.hpp"
#include "nccl/Libnccl.hpp"

namespace torchcomms_pg {

namespace {

std::atomic<const Libnccl*> allocating = nullptr;

// All Registrations of this process. Never destroyed: torch frees memory until the process ends.
struct Live {
  Mutex mutex;
  std::vector<Registrations*> all GUARDED_BY(mutex);
};

Live& live() {
  static auto& instance = neverDestroyed<Live>();
  return instance;
}

std::string named(const Libnccl& library) {
  return "NCCL " + versionText(library.version()) + " at " + library.path();
}

}  // namespace

void allocateWith(const Libnccl& library) {
  if (!library.has(Feature::allocator)) {
    const auto [functions, version] = introduced(Feature::allocator);
    throw LibraryError(
        "mem_allocator: " + named(library) + " has no allocator (" + functions +
        "); it came with NCCL " + version);
  }
  const Libnccl* before = nullptr;
  if (!allocating.compare_exchange_strong(before, &library) && before != &library) {
    throw LibraryError(
        "mem_allocator: this process allocates with " + named(*before) +
        " already, and memory of two libraries cannot be told apart; have this group use that "
        "one (option nccl_library), not " +
        named(library));
  }
}

Registrations::Registrations(const Library& library) : library_(library) {
  const LockGuard lock(live().mutex);
  live().all.push_back(this);
}

Registrations::~Registrations() {
  const LockGuard lock(live().mutex);
  std::erase(live().all, this);
}

ncclResult_t Registrations::add(
    ncclComm_t comm, Pool pool, const PoolSegment& segment, bool symmetric) {
  const LockGuard adding(adding_);
  UniqueLock lock(mutex_);
  auto& entries = pools_[pool];
  const auto found = entries.find(segment.address);
  if (found != entries.end()) {
    if (found->second.bytes == segment.bytes && found->second.symmetric == symmetric) {
      return ncclSuccess;
    }
    // Deregisters the old entry: `symmetric` has changed, or the segment was freed without a call
    // of released() and allocated anew.
    const auto result = deregister(found->second);
    entries.erase(found);
    if (result != ncclSuccess) {
      return result;
    }
  }
  lock.unlock();
  Entry entry{comm, segment.bytes, symmetric, nullptr, nullptr};
  const auto result =
      symmetric ? library_.commWindowRegister(
                      comm, segment.address, segment.bytes, &entry.window, NCCL_WIN_COLL_SYMMETRIC)
                : library_.commRegister(comm, segment.address, segment.bytes, &entry.handle);
  if (result == ncclSuccess) {
    lock.lock();
    entries.emplace(segment.address, entry);
  }
  return result;
}

ncclResult_t Registrations::deregister(const Entry& entry) const {
  return entry.symmetric ? library_.commWindowDeregister(entry.comm, entry.window)
                         : library_.commDeregister(entry.comm, entry.handle);
}

ncclResult_t Registrations::clear(Entries& entries) const {
  auto first = ncclSuccess;
  for (const auto& [address, entry] : entries) {
    const auto result = deregister(entry);
    first = first == ncclSuccess ? result : first;
  }
  entries.clear();
  return first;
}

std::optional<ncclResult_t> Registrations::remove(Pool pool) {
  const LockGuard adding(adding_);
  const LockGuard lock(mutex_);
  const auto found = pools_.find(pool);
  if (found == pools_.end()) {
    return std::nullopt;
  }
  const auto result = clear(found->second);
  pools_.erase(found);
  return result;
}

void Registrations::removeAll() {
  const LockGuard adding(adding_);
  const LockGuard lock(mutex_);
  for (auto& [pool, entries] : pools_) {
    clear(entries);
  }
  pools_.clear();
}

void Registrations::forget() {
  const LockGuard adding(adding_);
  const LockGuard lock(mutex_);
  pools_.clear();
}

void Registrations::released(void* address) {
  const LockGuard lock(live().mutex);
  for (auto* const registrations : live().all) {
    const LockGuard dropping(registrations->mutex_);
    for (auto& [pool, entries] : registrations->pools_) {
      if (const auto found = entries.find(address); found != entries.end()) {
        registrations->deregister(found->second);
        entries.erase(found);
      }
    }
  }
}

}  // namespace torchcomms_pg

void* torchcomms_pg_allocate(size_t bytes, int, cudaStream_t) {
  using namespace torchcomms_pg;
  // torch has set the current device.
  const auto& library = *allocating.load();
  void* memory = nullptr;
  if (library.memAlloc(&memory, bytes) == ncclSuccess) {
    return memory;
  }
  const std::string why = library.getLastError(nullptr);
  if (why.find("out of memory") != std::string::npos) {
    return nullptr;
  }
  throw std::runtime_error("ncclMemAlloc of " + std::to_string(bytes) + " bytes: " + why);
}

void torchcomms_pg_free(void* memory, size_t, int, cudaStream_t) {
  using namespace torchcomms_pg;
  Registrations::released(memory);
  // torch has no use for an error: the process may be exiting.
  allocating.load()->memFree(memory);
}
