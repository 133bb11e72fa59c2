// NCCL's API for buffers in host memory, on any number of hosts.
#pragma once

#include "gloo/Comm.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg::gloo {

// Returns the library, with streams as in shm/api/Api.hpp. It lacks unique ids and what needs them,
// since ranks meet in a store (newComm); also registration, windows and shrinking.
const Library& library();

// Makes a communicator for the library, of the ranks that meet in a store. Takes over
// `members.inside`, and aborts it if the ranks cannot be connected.
ncclComm_t newComm(Members members, Connected connected, const std::function<void()>& look);

}  // namespace torchcomms_pg::gloo
