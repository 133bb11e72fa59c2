// Descriptors that processes of one user open in each other.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace torchcomms_pg::shm {

// Random number that names a descriptor to those who are told it.
using Token = std::array<uint64_t, 2>;

// Throws NcclError.
Token makeToken();

// Lets processes of this user open the descriptor, until it is withdrawn, also where /proc keeps
// them from it: this process is not dumpable, and a thread of it hands the descriptor out. Throws
// NcclError.
void share(const Token& token, int file);
void withdraw(const Token& token);

// Returns the path of descriptor `file` of process `pid`. That of this process does not depend on
// the pid namespace of /proc, nor on what other processes may see.
std::string descriptorPath(uint32_t pid, int file);

// Returns whether /proc keeps this process from the descriptors of `pid`, which lives. `error`:
// that of a call with such a path.
bool forbidden(uint32_t pid, int error);

// Opens descriptor `file` of process `pid`, which shares it. Throws NcclError, which tells what to
// do where the system forbids it.
int openShared(uint32_t pid, int file, const Token& token);

}  // namespace torchcomms_pg::shm
