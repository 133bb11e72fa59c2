// Memory: what is registered with a communicator, and what its library has itself.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "comm/Communicator.hpp"
#include "nccl/Memory.hpp"

namespace torchcomms_pg::ops {

// Each raises NotImplementedError where the library lacks the function.

// Registers the segments of a pool of torch's, those that are not yet, so that the library uses
// them as they are. They are no more when they are freed, or the communicator is closed.
// `symmetric`: they lie alike on all ranks; collective.
void registerMemory(
    Communicator& comm,
    Registrations::Pool pool,
    const std::vector<Segment>& segments,
    bool symmetric);
// False: it was not registered.
bool deregisterMemory(Communicator& comm, Registrations::Pool pool);

// Gives back the library's memory on the device when all that is in flight has ended. Until
// resume() operations raise. Both are collective.
void suspend(Communicator& comm);
void resume(Communicator& comm);
// In bytes: "suspend" is what suspend() gives back, "persist" what it does not, "total" both;
// "suspended" is 1 after it. Also while suspended.
std::unordered_map<std::string, uint64_t> memoryStats(Communicator& comm);

}  // namespace torchcomms_pg::ops
