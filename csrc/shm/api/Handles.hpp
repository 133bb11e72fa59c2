// The handles that callers hold, and their communicators.
#pragma once

#include <nccl.h>

#include <memory>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// Adds a communicator to the table of handles, and returns its new handle. A handle that was
// removed or never existed causes an error, not a crash. All functions of this file are callable
// from any thread.
ncclComm_t addHandle(std::shared_ptr<Comm> comm);

// Returns the communicator, which the caller then owns, too. Throws NcclError, whose text names
// `operation`, if the handle is null or unknown.
std::shared_ptr<Comm> findHandle(ncclComm_t handle, const char* operation);

bool isHandle(ncclComm_t handle);

void removeHandle(ncclComm_t handle);

}  // namespace torchcomms_pg::shm
