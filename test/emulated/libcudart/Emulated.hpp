// Functions of the emulated runtime for the operators and the emulated NCCL.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#define EMULATED_SHARED __attribute__((visibility("default")))

namespace torchcomms_pg::host {
class HostStream;
}

namespace emulated {

// Runs the kernel in the stream's order, and again with each replay if the stream captures a graph.
// An exception of it is a fault of the device.
EMULATED_SHARED cudaError_t queueKernel(cudaStream_t stream, std::function<void()> kernel);

// Returns the stream behind a handle, also that of the default stream; null for none.
EMULATED_SHARED torchcomms_pg::host::HostStream* hostStream(cudaStream_t stream);

EMULATED_SHARED cudaStreamCaptureStatus captureStatus(cudaStream_t stream);

// Keeps `object`, if the stream captures, until the graph and all its instances are gone. False if
// it does not capture.
EMULATED_SHARED bool keepWithGraph(cudaStream_t stream, std::shared_ptr<void> object);

EMULATED_SHARED int currentDevice();

// Register memory of the current device that another library has allocated, and forget it.
EMULATED_SHARED void adoptMemory(void* memory, size_t bytes);
EMULATED_SHARED void disownMemory(void* memory);

}  // namespace emulated
