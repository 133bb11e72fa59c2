// NCCL's API for buffers in host memory, on any number of hosts.
#pragma once

#include "gloo/Comm.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::gloo {

// Returns the table. Streams are as in shm/api/Api.hpp. Missing: unique ids and what needs them,
// since ranks meet in a store (newComm); registration, windows, shrinking.
const NcclApi& api();

// Makes a communicator for the table, of the ranks that meet in a store. If they cannot be
// connected, `inside` is given back.
ncclComm_t newComm(Members members, Connected connected, const std::function<void()>& look);

}  // namespace torchcomms_pg::gloo
