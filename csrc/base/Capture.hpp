// Functions of the CUDA runtime that torch does not offer, for captures of graphs. They have no
// effect if this process has not loaded the runtime.
#pragma once

#include <nccl.h>

namespace torchcomms_pg {

// Returns whether a graph captures the stream; false without the runtime. For torch before 2.12,
// whose streams do not report captures.
bool isCudaCapturing(cudaStream_t stream);

// Lets the calling thread query events while another thread captures a graph. A capture in the
// default mode is invalidated by a query from any thread that is not in thread-local mode (CUDA
// Runtime API, cudaThreadExchangeStreamCaptureMode). The mode lasts until the thread ends. The call
// creates a context on the thread's current device, so set that device first.
void useThreadLocalCaptureMode();

}  // namespace torchcomms_pg
