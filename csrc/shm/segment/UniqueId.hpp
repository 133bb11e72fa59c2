// The rendezvous: a unique id names an anonymous memory file of the process that made the id. The
// file has no name in any file system, so a killed process leaves nothing behind, and the size of
// /dev/shm is no limit.
#pragma once

#include <nccl.h>

#include <cstdint>

#include "shm/segment/Descriptor.hpp"
#include "shm/segment/Layout.hpp"

namespace torchcomms_pg::shm {

// Content of the 128 bytes of an ncclUniqueId.
struct IdContent {
  uint64_t magic;
  Token token;        // the memory's header has the same token
  uint64_t bootHash;  // identifies the host and its boot
  uint64_t startTime;
  uint32_t pid;
  int32_t file;
  uint32_t user;
  uint32_t pidSpace;  // host::pidSpace()
  char host[64];
  uint64_t checksum;
};
static_assert(sizeof(IdContent) == sizeof(ncclUniqueId));

inline constexpr uint64_t kMagic = 0x32304d4853475054 ^ kLayout;

// Makes an id. Its memory file stays open in this process until all ranks have joined or the
// communicator has failed. Throws NcclError.
ncclUniqueId makeUniqueId();

// Returns a descriptor of the id's memory file. Throws NcclError with the reason if this process
// cannot reach the file.
FileDescriptor openMemory(const IdContent& content);

// Closes the memory files of this process's ids whose ranks have all joined, or whose communicator
// has failed.
void closeCompletedIds();

IdContent decode(const ncclUniqueId& id);

}  // namespace torchcomms_pg::shm
