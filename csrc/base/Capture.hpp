// Functions for the capture of CUDA graphs that torch does not offer. They call the CUDA runtime
// that this process has loaded, and do nothing if it has loaded none.
#pragma once

#include <nccl.h>

namespace torchcomms_pg {

// Returns whether a stream records a graph. For torch before 2.12, whose streams do not report it.
bool isCudaCapturing(cudaStream_t stream);

// Lets the calling thread query events while another thread captures a graph. A capture in the
// default mode is invalidated by a query from any thread that is not in thread-local mode (CUDA
// Runtime API, cudaThreadExchangeStreamCaptureMode). Lasts for the rest of the thread's life. Set
// the thread's device first: the call creates a context.
void useThreadLocalCaptureMode();

}  // namespace torchcomms_pg
