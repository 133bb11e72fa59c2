// Memory files, and file descriptors that the processes of one user share.
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>

#include "base/FileDescriptor.hpp"
#include "shm/Host.hpp"

namespace torchcomms_pg::shm {

// Random number that names a descriptor. Only processes that have received the number can ask for
// the descriptor.
using Token = std::array<uint64_t, 2>;

// Makes a new token. Throws NcclError.
Token makeToken();

// Lets processes of this user open the descriptor. If this process is dumpable, they use /proc, and
// share() does nothing. Otherwise /proc denies them the descriptor, and a thread of this process
// sends it to them until withdraw() is called. Throws NcclError.
void share(const Token& token, int file);
void withdraw(const Token& token);

// Returns the path of descriptor `file` of process `pid`. For this process itself the path names
// /proc/self, which works in every pid namespace and whatever /proc hides.
std::string descriptorPath(uint32_t pid, int file);

// Returns whether /proc denies this process the descriptors of the living process `pid`. `error` is
// the errno of a failed call with the path of such a descriptor.
bool forbidden(uint32_t pid, int error);

// Opens descriptor `file`, which process `pid` shares under `token`, and returns this process's
// descriptor. Throws NcclError, whose text says what to do if the system forbids the access.
FileDescriptor openShared(uint32_t pid, int file, const Token& token);

// Fixes the size of a memory file, so that no process takes pages away from the others. Returns
// false, and sets errno, if the system refuses it.
bool sealSize(int file);

// Maps `bytes` bytes of a memory file. Dropping the last reference unmaps them. Throws NcclError,
// whose text begins with `what`.
std::shared_ptr<std::byte> mapFile(
    int file, size_t bytes, const std::string& what, uint64_t offset = 0);

// Returns the error of a failed call of the system.
NcclError systemFailure(const std::string& what, int error = errno);

}  // namespace torchcomms_pg::shm
