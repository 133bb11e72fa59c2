// NCCL's API over shared memory, for buffers in host memory.
#pragma once

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::shm {

// Returns the table. Communicators may join processes or threads of one host; every function is
// thread-safe in the way NCCL's are.
//
// A `cudaStream_t` given to it is a HostStream* (host/HostStream.hpp). Null stands for the calling
// thread: the operation has finished when the call (or the ncclGroupEnd around it) returns.
const NcclApi& api();

}  // namespace torchcomms_pg::shm
