// Memory that other processes can map: what memAlloc gives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace torchcomms_pg::shm {

// Where a part of Memory is, for a peer that wants to map it. Made by the
// process that has it, which must keep it until the peer has mapped it.
struct MemoryAddress {
  uint32_t pid;
  int32_t file;
  uint64_t device;  // with the inode: whether `file` is still the same
  uint64_t inode;
  uint64_t offset;
  uint64_t bytes;
};

// Owns a mapping of an anonymous memory file and its descriptor. There is no
// name in any file system, so nothing is left behind whoever is killed when.
class Memory {
 public:
  // Throws Failure, also when the system is short of memory: its pages are
  // taken at once, because a page that is missing later ends the process.
  static std::shared_ptr<Memory> allocate(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  MemoryAddress address(const void* part, size_t bytes) const;

 private:
  Memory(int file, std::byte* data, size_t bytes) : file_(file), data_(data), bytes_(bytes) {}

  const int file_;
  std::byte* const data_;
  const size_t bytes_;
};

// Maps it; the last reference unmaps. Throws Failure.
std::shared_ptr<std::byte> mapMemory(const MemoryAddress& address);

// What memAlloc has given and memFree has not taken back, by address. What is
// freed stays mapped while somebody else shares in it. Called from any thread.
void* allocateMemory(size_t bytes);
void freeMemory(void* pointer);  // throws Failure for one that is not from there
// The memory that the range is a part of, or null.
std::shared_ptr<Memory> findMemory(const void* pointer, size_t bytes);

}  // namespace torchcomms_pg::shm
