// Operations that came to NCCL late, for every NCCL: the library's own if it has them, otherwise
// messages in one group, as NCCL documents it.
#pragma once

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Sends part r of `in` to rank r and receives part r of `out` from it. `count`: of one part.
ncclResult_t allToAll(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream);

// Gathers the ranks' inputs one after another in `out`, on `root` only. `count`: of one input.
ncclResult_t gather(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream);

// Sends part r of `in`, on `root`, to rank r. `count`: of one part.
ncclResult_t scatter(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream);

// Calls `body` between ncclGroupStart and ncclGroupEnd. The group is closed
// also after an error.
template <class Body>
ncclResult_t grouped(const NcclApi& api, Body&& body) {
  const auto started = api.groupStart();
  if (started != ncclSuccess) {
    return started;
  }
  const auto result = body();
  const auto ended = api.groupEnd();
  return result != ncclSuccess ? result : ended;
}

}  // namespace torchcomms_pg
