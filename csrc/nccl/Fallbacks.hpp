// Operations that NCCL added late, for every version: the library's own function if it has one,
// otherwise messages in one group, as NCCL documents it.
#pragma once

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Sends part r of `in` to rank r and receives part r of `out` from rank r. A part has `count`
// elements.
ncclResult_t allToAll(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream);

// Gathers the ranks' inputs one after another in `out`, on `root` only. An input has `count`
// elements.
ncclResult_t gather(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream);

// Sends part r of the root's `in` to rank r. A part has `count` elements.
ncclResult_t scatter(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream);

// Calls `body` between ncclGroupStart and ncclGroupEnd. Ends the group also after an error.
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

// Calls `launch` with each rank as the root, in one group, up to the first error.
template <class Launch>
ncclResult_t groupedByRoot(const NcclApi& api, int ranks, const Launch& launch) {
  return grouped(api, [&] {
    auto result = ncclSuccess;
    for (int root = 0; root < ranks && result == ncclSuccess; ++root) {
      result = launch(root);
    }
    return result;
  });
}

}  // namespace torchcomms_pg
