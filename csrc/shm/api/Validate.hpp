// Checks of arguments, before an operation is enqueued. All throw NcclError, whose text names the
// operation, the argument, its value and the expected values.
#pragma once

#include <nccl.h>

#include <string>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

[[noreturn]] void invalidArgument(const char* operation, const std::string& text);

void checkPointer(const char* operation, const char* name, const void* pointer);
void checkBuffer(const char* operation, const char* name, const void* buffer, size_t elements);
void checkType(const char* operation, ncclDataType_t type);
void checkRank(const char* operation, const char* name, int rank, int ranks);

// Returns whether `config` asks for a blocking communicator, or `inherited` if `config` is null or
// leaves `blocking` undefined.
bool checkConfig(const char* operation, const ncclConfig_t* config, bool inherited);

// Checks the type, the root, the buffers, and that `count` elements per rank are addressable.
void checkCollective(const Collective& collective, const Comm& comm);

}  // namespace torchcomms_pg::shm
