// Whether a CUDA stream records a graph, for a torch whose streams do not tell (before 2.12).
#pragma once

#include <nccl.h>

namespace torchcomms_pg {

// Of the CUDA runtime that the process has loaded; without one there is nothing to record.
bool isCudaCapturing(cudaStream_t stream);

}  // namespace torchcomms_pg
