// The end of a communicator of NCCL.
#pragma once

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Destroys it, or aborts it if it has failed: libnccl refuses to destroy one whose peers are gone,
// keeps its memory, and from 2.24 on leaves the calling thread's group open (src/init.cc,
// ncclCommDestroy).
inline ncclResult_t destroyOrAbort(const NcclApi& api, ncclComm_t comm) {
  auto state = ncclSuccess;
  const auto asked = api.commGetAsyncError(comm, &state);
  const bool failed = asked != ncclSuccess || state != ncclSuccess;
  return failed ? api.commAbort(comm) : api.commDestroy(comm);
}

}  // namespace torchcomms_pg
