// Creation of communicators.
#pragma once

#include <nccl.h>

#include <chrono>
#include <memory>
#include <vector>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// Each function checks its arguments, throws NcclError, and is refused inside a group. `*made` is
// set when the function returns, for init even while it is still waiting for the other ranks, so
// that another thread can abort it; it is null again after an error.
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
