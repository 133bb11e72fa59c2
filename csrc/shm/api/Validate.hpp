// Checks of arguments, before an operation is enqueued. All throw NcclError, whose text names the
// operation, the argument, its value and the expected values.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

[[noreturn]] void invalidArgument(const char* operation, const std::string& text);

// Throws unless `right`; `wanted` says which values are.
void checkValue(
    const char* operation, const char* name, int64_t value, bool right, const char* wanted);
void checkRange(const char* operation, const char* name, int64_t value, int64_t low, int64_t high);
void checkPointer(const char* operation, const char* name, const void* pointer);
void checkBuffer(const char* operation, const char* name, const void* buffer, size_t elements);
void checkType(const char* operation, ncclDataType_t type);
void checkRank(const char* operation, const char* name, int rank, int ranks);
// Checks that `count` elements for each of `ranks` ranks are addressable.
void checkCount(const char* operation, size_t count, int ranks = 1);

// Returns whether `config` asks for a blocking communicator, or `inherited` if `config` is null or
// leaves `blocking` undefined.
bool checkConfig(const char* operation, const ncclConfig_t* config, bool inherited);

// Checks the type, the root, the buffers and the count.
void checkCollective(const Collective& collective, const Comm& comm);

}  // namespace torchcomms_pg::shm
