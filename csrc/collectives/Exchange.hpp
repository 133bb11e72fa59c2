// Messages between ranks inside a collective.
#pragma once

#include <vector>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Elements for or from one peer.
struct Part {
  void* data;
  size_t count;
  int peer;
};

// Sends `sends` and receives `receives` together.
ncclResult_t exchange(
    const NcclApi& api,
    const std::vector<Part>& sends,
    const std::vector<Part>& receives,
    ncclDataType_t type,
    ncclComm_t handle,
    cudaStream_t stream);

}  // namespace torchcomms_pg
