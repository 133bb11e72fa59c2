// Creation of communicators.
#pragma once

#include <nccl.h>

#include <chrono>
#include <memory>
#include <vector>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// Make communicators, as NCCL's functions do. They throw NcclError for wrong arguments, inside a
// group, and if they fail; `*made` is then null. They set `*made` before they wait for ranks to
// join, so that another thread can abort the wait. If `deadline` passes before a survivor has the
// new id, shrink() returns ncclInProgress with a null `*made`.
ncclResult_t initRank(
    ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config);
ncclResult_t split(
    const std::shared_ptr<Comm>& parent, int color, int key, ncclComm_t* made,
    const ncclConfig_t* config);
ncclResult_t shrink(
    const std::shared_ptr<Comm>& parent, const std::vector<int>& excluded, ncclComm_t* made,
    const ncclConfig_t* config, int flags, std::chrono::steady_clock::time_point deadline);

}  // namespace torchcomms_pg::shm
