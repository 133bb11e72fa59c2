// NCCL's functions that make, inspect and end communicators and manage memory and operators.
#pragma once

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::shm {

// Adds these functions to the table.
void addManagement(NcclApi& table);

}  // namespace torchcomms_pg::shm
