// Memory that is registered with a communicator, and the memory of its library.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "comm/Communicator.hpp"
#include "nccl/Allocator.hpp"

namespace torchcomms_pg::ops {

// All but deregisterMemory() raise NotImplementedError if the library lacks what they call.

// Registers those segments of one of torch's memory pools that are not registered yet, so that the
// library uses them in place. The registration ends when a segment is freed or the communicator is
// closed. `symmetric`: the segments have the same layout on all ranks; the call is then collective.
void registerMemory(
    Communicator& comm, Registrations::Pool pool, const std::vector<PoolSegment>& segments,
    bool symmetric);
// Ends the registration of a pool. Returns false if the pool was not registered.
bool deregisterMemory(Communicator& comm, Registrations::Pool pool);

// suspend() waits for all operations in flight, then frees the library's memory on the device.
// resume() allocates it again. In between, operations raise. Both functions are collective.
void suspend(Communicator& comm);
void resume(Communicator& comm);
// Returns numbers of bytes: "suspend" for what suspend() frees, "persist" for what it keeps,
// "total" for both. "suspended" is 1 after suspend(). Callable while suspended, too.
std::unordered_map<std::string, uint64_t> memoryStats(Communicator& comm);

}  // namespace torchcomms_pg::ops
