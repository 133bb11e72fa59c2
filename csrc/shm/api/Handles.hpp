// The communicators that callers hold.
#pragma once

#include <nccl.h>

#include <memory>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// A table of them: a handle that was destroyed or never existed is an error,
// not a crash, and whoever uses a communicator shares in its ownership. Called
// from any thread.
ncclComm_t addHandle(std::shared_ptr<Comm> comm);

// Throws Failure naming `operation` for null and unknown handles.
std::shared_ptr<Comm> findHandle(ncclComm_t handle, const char* operation);

bool isHandle(ncclComm_t handle);

void removeHandle(ncclComm_t handle);

}  // namespace torchcomms_pg::shm
