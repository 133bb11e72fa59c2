// The communicators that callers hold.
#pragma once

#include <nccl.h>

#include <memory>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// Adds a communicator to the table of handles. A handle that was destroyed or never existed causes
// an error, not a crash. Every user of a communicator shares its ownership. Callable from any
// thread.
ncclComm_t addHandle(std::shared_ptr<Comm> comm);

// Returns the communicator. Throws NcclError naming `operation` for null and unknown handles.
std::shared_ptr<Comm> findHandle(ncclComm_t handle, const char* operation);

bool isHandle(ncclComm_t handle);

void removeHandle(ncclComm_t handle);

}  // namespace torchcomms_pg::shm
