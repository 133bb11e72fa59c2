// Memory that other processes can map, and that memAlloc returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shm/segment/Descriptor.hpp"

namespace torchcomms_pg::shm {

// Address of a part of Memory, for a peer that maps it. Made by the process that has the memory,
// which must keep it until the peer has mapped it.
struct MemoryAddress {
  uint32_t pid;
  int32_t file;
  Token token;      // under which the process shares it
  uint64_t device;  // with the inode: identifies the file behind `file`
  uint64_t inode;
  uint64_t offset;
  uint64_t bytes;
};

// Owns a mapping of an anonymous memory file and its descriptor. The file has no name in any file
// system, so nothing is left behind by a killed process.
class Memory {
 public:
  // Throws NcclError, also when the system is short of memory: the pages are taken at once, because
  // a page that is missing later ends the process.
  static std::shared_ptr<Memory> allocate(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  MemoryAddress address(const void* part, size_t bytes) const;

 private:
  Memory(int file, std::byte* data, size_t bytes) : file_(file), data_(data), bytes_(bytes) {}

  const Token token_ = makeToken();
  const int file_;
  std::byte* const data_;
  const size_t bytes_;
};

// Maps the part; the last reference unmaps it. Throws NcclError.
std::shared_ptr<std::byte> mapMemory(const MemoryAddress& address);

// Serve memAlloc and memFree, whose live memory is kept by address. Freed memory stays mapped while
// others share in it. Callable from any thread.
void* allocateMemory(size_t bytes);
void freeMemory(void* pointer);  // throws NcclError for one that is not from there
// Returns the memory that contains the range, or null.
std::shared_ptr<Memory> findMemory(const void* pointer, size_t bytes);

}  // namespace torchcomms_pg::shm
