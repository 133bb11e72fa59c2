// Memory that memAlloc returns and other processes can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shm/segment/Descriptor.hpp"

namespace torchcomms_pg::shm {

// Address of a part of Memory, for a peer that maps it. The process that owns the memory makes the
// address, and has to keep the memory until the peer has mapped it.
struct MemoryAddress {
  uint32_t pid;
  int32_t file;
  Token token;      // names descriptor `file`, see share()
  uint64_t device;  // identifies, with `inode`, the file that `file` refers to
  uint64_t inode;
  uint64_t offset;
  uint64_t bytes;
};

// Owns the descriptor and a mapping of an anonymous memory file. The file has no name in any file
// system, so a killed process leaves nothing behind.
class Memory {
 public:
  // Allocates all pages at once, because the system kills a process that touches a page for which
  // memory is lacking. Throws NcclError, for example if the system is short of memory.
  explicit Memory(size_t bytes);
  ~Memory() { withdraw(token_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  MemoryAddress address(const void* part, size_t bytes) const;

 private:
  const Token token_ = makeToken();
  const size_t bytes_;
  const FileDescriptor file_;
  std::shared_ptr<std::byte> data_;
};

// Maps the memory at `address` and returns it, or null if the address has 0 bytes. Dropping the
// last reference unmaps it. Throws NcclError.
std::shared_ptr<std::byte> mapMemory(const MemoryAddress& address);

// Implement memAlloc and memFree. Freed memory stays mapped while a window or WindowView of this
// process refers to it. Callable from any thread.
void* allocateMemory(size_t bytes);
void freeMemory(void* pointer);  // throws NcclError if allocateMemory() did not return it
// Returns the memory that contains the whole range, or null if none does.
std::shared_ptr<Memory> findMemory(const void* pointer, size_t bytes);

}  // namespace torchcomms_pg::shm
