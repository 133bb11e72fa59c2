// Messages between ranks inside a collective.
#pragma once

#include <vector>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Elements that are sent to one peer or received from it.
struct Part {
  void* data;
  size_t count;
  int peer;
};

// Sends `sends` and receives `receives` in one group of operations.
ncclResult_t exchange(
    const NcclApi& api,
    const std::vector<Part>& sends,
    const std::vector<Part>& receives,
    ncclDataType_t type,
    ncclComm_t handle,
    cudaStream_t stream);

}  // namespace torchcomms_pg
