#include "shm/segment/MappableMemory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "base/FileDescriptor.hpp"
#include "base/Mutex.hpp"
#include "host/Limits.hpp"
#include "shm/Host.hpp"
#include "shm/segment/Descriptor.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

NcclError systemFailure(const std::string& what, int error) {
  return NcclError(ncclSystemError, what + ": " + std::strerror(error));
}

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

std::shared_ptr<Memory> Memory::allocate(size_t bytes) {
  const std::string what = "memAlloc: " + std::to_string(bytes) + " bytes";
  FileDescriptor file{memfd_create("torchcomms_pg_memory", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!file) throw systemFailure(what, errno);
  take(file.get(), bytes, what);
  // Seals the size, so that no process can take the pages away from a peer.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(file.get(), F_ADD_SEALS, kSeals) != 0 || fchmod(file.get(), 0600) != 0) {
    throw systemFailure(what, errno);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) throw systemFailure(what, errno);
  return std::shared_ptr<Memory>(new Memory(file.release(), static_cast<std::byte*>(data), bytes));
}

Memory::~Memory() {
  withdraw(token_);
  munmap(data_, bytes_);
  ::close(file_);
}

MemoryAddress Memory::address(const void* part, size_t bytes) const {
  struct stat status{};
  if (fstat(file_, &status) != 0) throw systemFailure("fstat of memory of memAlloc", errno);
  share(token_, file_);
  return MemoryAddress{
      .pid = processId(),
      .file = file_,
      .token = token_,
      .device = status.st_dev,
      .inode = status.st_ino,
      .offset = static_cast<uint64_t>(static_cast<const std::byte*>(part) - data_),
      .bytes = bytes,
  };
}

std::shared_ptr<std::byte> mapMemory(const MemoryAddress& address) {
  if (address.bytes == 0) return nullptr;
  const FileDescriptor file{openShared(address.pid, address.file, address.token)};
  struct stat status{};
  if (fstat(file.get(), &status) != 0 || status.st_dev != address.device ||
      status.st_ino != address.inode) {
    throw NcclError(
        ncclInvalidUsage,
        descriptorPath(address.pid, address.file) + " is no longer the memory that was registered");
  }
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t skipped = address.offset % page;
  const size_t length = address.bytes + skipped;
  void* base = mmap(
      nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(),
      static_cast<off_t>(address.offset - skipped));
  if (base == MAP_FAILED) {
    throw systemFailure("mapping " + std::to_string(address.bytes) + " bytes", errno);
  }
  const std::shared_ptr<std::byte> mapping(
      static_cast<std::byte*>(base), [length](std::byte* pointer) { munmap(pointer, length); });
  return {mapping, mapping.get() + skipped};
}

void* allocateMemory(size_t bytes) {
  auto memory = Memory::allocate(bytes);
  std::byte* const data = memory->data();
  LockGuard lock(allocations().mutex);
  allocations().all[data] = std::move(memory);
  return data;
}

void freeMemory(void* pointer) {
  std::shared_ptr<Memory> memory;  // declared first, so that it is unmapped after unlocking
  LockGuard lock(allocations().mutex);
  const auto found = allocations().all.find(static_cast<const std::byte*>(pointer));
  if (found == allocations().all.end()) {
    throw NcclError(
        ncclInvalidArgument, "memFree: ptr was not returned by memAlloc, or is already freed");
  }
  memory = std::move(found->second);
  allocations().all.erase(found);
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
