// File descriptors that processes of one user open from each other.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace torchcomms_pg::shm {

// Random number that names a descriptor. Only processes that have received the number can ask for
// it.
using Token = std::array<uint64_t, 2>;

// Throws NcclError.
Token makeToken();

// Lets processes of this user open the descriptor, until it is withdrawn. If this process is not
// dumpable, /proc denies them the descriptor; then a thread of this process sends it to them.
// Throws NcclError.
void share(const Token& token, int file);
void withdraw(const Token& token);

// Returns the path of descriptor `file` of process `pid`. This process's own path depends neither
// on the pid namespace of /proc nor on what other processes may see.
std::string descriptorPath(uint32_t pid, int file);

// Returns whether /proc denies this process the descriptors of `pid`, which is alive. `error`:
// errno of a call with such a path.
bool forbidden(uint32_t pid, int error);

// Opens descriptor `file` of process `pid`, which shares it. Throws NcclError, with what to do if
// the system forbids it.
int openShared(uint32_t pid, int file, const Token& token);

}  // namespace torchcomms_pg::shm
