// Checks of arguments, before anything is enqueued. All throw NcclError with the operation, the
// argument, its value and the expected one.
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

// Returns whether a configuration asks for a blocking communicator, or `inherited` if it does not
// say.
bool checkConfig(const char* operation, const ncclConfig_t* config, bool inherited);

// Also checks that `count` elements per rank are addressable.
void checkCollective(const Collective& collective, const Comm& comm);

}  // namespace torchcomms_pg::shm
