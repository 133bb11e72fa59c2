#include "shm/segment/MappableMemory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/Mutex.hpp"
#include "host/Limits.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

// Bytes that take() allocates between two checks of the available memory, since other ranks
// allocate at the same time.
constexpr size_t kBetweenLooks = 64 << 20;

// Allocates the pages of the file. Throws NcclError if less memory is available, before the system
// kills processes to free memory.
void take(int file, size_t bytes, const std::string& what) {
  for (size_t taken = 0; taken < bytes;) {
    if (const auto available = host::availableMemory(); bytes - taken > available.bytes) {
      throw NcclError(
          ncclSystemError,
          what + ", and " + available.where + " has " + std::to_string(available.bytes) +
              " available" +
              (taken == 0 ? "" : " when " + std::to_string(taken) + " have been taken"));
    }
    const size_t piece = std::min(kBetweenLooks, bytes - taken);
    const int error = posix_fallocate(file, static_cast<off_t>(taken), static_cast<off_t>(piece));
    if (error == 0) {
      taken += piece;
    } else if (error != EINTR) {
      throw systemFailure(what, error);
    }
  }
}

struct Allocations {
  Mutex mutex;
  // By first address.
  std::map<const std::byte*, std::shared_ptr<Memory>> all GUARDED_BY(mutex);
};

Allocations& allocations() {
  return forkSafe<Allocations>();
}

}  // namespace

Memory::Memory(size_t bytes)
    : bytes_(bytes), file_(memfd_create("torchcomms_pg_memory", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  const std::string what = "memAlloc: " + std::to_string(bytes) + " bytes";
  if (!file_) throw systemFailure(what);
  take(file_.get(), bytes, what);
  if (!sealSize(file_.get()) || fchmod(file_.get(), 0600) != 0) throw systemFailure(what);
  data_ = mapFile(file_.get(), bytes, what);
}

MemoryAddress Memory::address(const void* part, size_t bytes) const {
  struct stat status{};
  if (fstat(file_.get(), &status) != 0) throw systemFailure("fstat of memory of memAlloc");
  share(token_, file_.get());
  return MemoryAddress{
      .pid = processId(),
      .file = file_.get(),
      .token = token_,
      .device = status.st_dev,
      .inode = status.st_ino,
      .offset = static_cast<uint64_t>(static_cast<const std::byte*>(part) - data()),
      .bytes = bytes,
  };
}

std::shared_ptr<std::byte> mapMemory(const MemoryAddress& address) {
  if (address.bytes == 0) return nullptr;
  const FileDescriptor file = openShared(address.pid, address.file, address.token);
  struct stat status{};
  if (fstat(file.get(), &status) != 0 || status.st_dev != address.device ||
      status.st_ino != address.inode) {
    throw NcclError(
        ncclInvalidUsage,
        descriptorPath(address.pid, address.file) + " is no longer the memory that was registered");
  }
  const auto what = "mapping " + std::to_string(address.bytes) + " bytes";
  return mapFile(file.get(), address.bytes, what, address.offset);
}

void* allocateMemory(size_t bytes) {
  auto memory = std::make_shared<Memory>(bytes);
  std::byte* const data = memory->data();
  LockGuard lock(allocations().mutex);
  allocations().all[data] = std::move(memory);
  return data;
}

void freeMemory(void* pointer) {
  decltype(Allocations::all)::node_type
      freed;  // declared first, so that it is unmapped after unlocking
  LockGuard lock(allocations().mutex);
  freed = allocations().all.extract(static_cast<const std::byte*>(pointer));
  if (freed.empty()) {
    throw NcclError(
        ncclInvalidArgument, "memFree: ptr was not returned by memAlloc, or is already freed");
  }
}

std::shared_ptr<Memory> findMemory(const void* pointer, size_t bytes) {
  const auto* first = static_cast<const std::byte*>(pointer);
  LockGuard lock(allocations().mutex);
  auto found = allocations().all.upper_bound(first);
  if (found == allocations().all.begin()) return nullptr;
  --found;
  const auto before = static_cast<size_t>(first - found->second->data());
  const size_t all = found->second->bytes();
  return before <= all && bytes <= all - before ? found->second : nullptr;
}

}  // namespace torchcomms_pg::shm
