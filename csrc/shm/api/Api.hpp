// NCCL's API over shared memory, for buffers in host memory.
#pragma once

#include "nccl/Library.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::shm {

// Returns the library. A communicator may connect processes or threads of one host. Every function
// is as thread-safe as NCCL's.
//
// A `cudaStream_t` that the caller passes is a HostStream* (host/HostStream.hpp). Null stands for
// the calling thread: the operation has finished when the call returns, or in a group when
// ncclGroupEnd returns.
const Library& library();

// Returns the functions of library() with NCCL's signatures, for the same communicators.
const NcclApi& ncclFunctions();

// Returns a library without allToAll, gather and scatter, which an old NCCL lacks. With it, a
// simulated accelerator takes the same code path as a GPU with an old NCCL.
const Library& oldNccl();

}  // namespace torchcomms_pg::shm
