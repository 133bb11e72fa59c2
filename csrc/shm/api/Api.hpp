// NCCL's API over shared memory, for buffers in host memory.
#pragma once

#include "nccl/Library.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::shm {

// Returns the library. A communicator may connect processes or threads of one host. Every function
// is as thread-safe as NCCL's.
//
// A `cudaStream_t` given to it is a HostStream* (host/HostStream.hpp). Null stands for the calling
// thread: the operation has finished when the call (or the ncclGroupEnd around it) returns.
const Library& library();

// Returns its functions with NCCL's signatures, whose communicators are the same.
const NcclApi& ncclFunctions();

// Returns a library with some of these functions. With it a simulated accelerator takes the code
// path of a GPU with an old NCCL, and its fallbacks.
const Library& oldNccl();

}  // namespace torchcomms_pg::shm
