// NCCL's API over torch's Gloo, for buffers in host memory, on any number of hosts.
#pragma once

#include "gloo/Comm.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::gloo {

// The table. Streams are as in shm/Api.hpp. Not there: unique ids and what needs them, since
// ranks meet in a store (newComm); registration, windows, shrinking.
const NcclApi& api();

// A communicator for the table, of the ranks that meet in `store`.
ncclComm_t newComm(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    Connect connect,
    Connected connected);

}  // namespace torchcomms_pg::gloo
