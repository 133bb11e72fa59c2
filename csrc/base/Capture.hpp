// Functions for the capture of CUDA graphs that torch does not offer. They call the CUDA runtime
// that the process has loaded; without one there is nothing to capture.
#pragma once

#include <nccl.h>

namespace torchcomms_pg {

// Returns whether a stream records a graph, for a torch whose streams do not tell (before 2.12).
bool isCudaCapturing(cudaStream_t stream);

// Lets the calling thread ask for events without invalidating what another thread captures: a
// capture in the default mode forbids that to all threads but those in thread-local mode (CUDA
// Runtime API, cudaThreadExchangeStreamCaptureMode). Lasts for the rest of the thread's life. The
// thread has to have its device set, since the call makes a context.
void harmNoCudaCapture();

}  // namespace torchcomms_pg
