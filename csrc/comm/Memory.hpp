// Memory that is registered with a communicator, and its library's own.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "comm/Communicator.hpp"
#include "nccl/Memory.hpp"

namespace torchcomms_pg::ops {

// Functions that raise NotImplementedError where the library lacks what they call.

// Registers the segments of a pool of torch's that are not registered yet, so that the library uses
// them as they are. They cease to be registered when they are freed, or the communicator is closed.
// `symmetric`: they lie alike on all ranks; collective.
void registerMemory(
    Communicator& comm,
    Registrations::Pool pool,
    const std::vector<Segment>& segments,
    bool symmetric);
// Ends the registration of a pool. False: it was not registered.
bool deregisterMemory(Communicator& comm, Registrations::Pool pool);

// Give back the library's memory on the device when all that is in flight has ended, and take it
// again. Operations raise between the two. Both are collective.
void suspend(Communicator& comm);
void resume(Communicator& comm);
// Returns numbers of bytes: "suspend" is what suspend() gives back, "persist" what it does not,
// "total" both; "suspended" is 1 after it. Callable also while suspended.
std::unordered_map<std::string, uint64_t> memoryStats(Communicator& comm);

}  // namespace torchcomms_pg::ops
