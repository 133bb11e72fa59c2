// NCCL's API for buffers in host memory, on any number of hosts.
#pragma once

#include "gloo/Comm.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg::gloo {

// Returns the library, whose streams are as in shm/api/Api.hpp. It has no unique ids and no init(),
// since ranks meet in a store (newComm). It also lacks registration, windows and shrinking.
const Library& library();

// Makes a communicator of library() for the ranks that meet in `members.store`, see Comm::make().
// Takes over `members.inside`, and aborts it if the ranks cannot be connected.
ncclComm_t newComm(Members members, Connected connected, const std::function<void()>& look);

}  // namespace torchcomms_pg::gloo
