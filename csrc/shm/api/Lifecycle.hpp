// Creation of communicators.
#pragma once

#include <nccl.h>

#include <chrono>
#include <memory>
#include <vector>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// All functions check their arguments, throw NcclError, and are refused inside a group. `*made` is
// set before they wait for the other ranks to join, so that another thread can abort the wait. It
// is null after an error.
ncclResult_t initRank(
    ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config);
ncclResult_t split(
    const std::shared_ptr<Comm>& parent,
    int color,
    int key,
    ncclComm_t* made,
    const ncclConfig_t* config);
ncclResult_t shrink(
    const std::shared_ptr<Comm>& parent,
    const std::vector<int>& excluded,
    ncclComm_t* made,
    const ncclConfig_t* config,
    int flags,
    std::chrono::steady_clock::time_point deadline);

}  // namespace torchcomms_pg::shm
