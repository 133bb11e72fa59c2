// NCCL's API over shared memory, for buffers in host memory.
#pragma once

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::shm {

// Returns the table. A communicator may connect processes or threads of one host. Every function is
// as thread-safe as NCCL's.
//
// A `cudaStream_t` given to it is a HostStream* (host/HostStream.hpp). Null stands for the calling
// thread: the operation has finished when the call (or the ncclGroupEnd around it) returns.
const NcclApi& api();

}  // namespace torchcomms_pg::shm
