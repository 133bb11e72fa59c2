// NCCL's functions that make, inspect and end communicators and manage memory and operators.
#pragma once

#include <chrono>
#include <span>

#include "nccl/NcclApi.hpp"
#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// Does what commShrink does, but returns ncclInProgress with a null `*made` if `deadline` passes
// before a survivor has the new id. Throws NcclError.
ncclResult_t shrink(
    Comm& parent, std::span<const int> excluded, ncclComm_t* made, const ncclConfig_t* config,
    int flags, std::chrono::steady_clock::time_point deadline);

// Adds these functions to the table.
void addManagement(NcclApi& table);

}  // namespace torchcomms_pg::shm
