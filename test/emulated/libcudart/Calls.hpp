// First and last steps of every function of the runtime: it is counted, waits while a test holds
// the driver, and keeps its error for cudaGetLastError.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#define EMULATED_API extern "C" __attribute__((visibility("default")))

namespace emulated {

// Called at the start of a function that asks nothing of the driver.
void called(const char* function);

// Called at the start of a function that takes the driver's lock of the context.
void calledDriver(const char* function);

// Keeps the error for cudaGetLastError, as every function of the runtime does
// (Runtime API, "Error Handling"), and returns it. `why` is for EMULATED_TRACE.
cudaError_t failed(cudaError_t error, const std::string& why);

// Returns whether the process has begun to exit. The runtime refuses calls from then on with
// cudaErrorCudartUnloading (Runtime API, "CUDA Runtime API errors").
bool unloading();

std::string threadName();

// Returns `text` as a string of JSON.
std::string quoted(const std::string& text);

}  // namespace emulated
