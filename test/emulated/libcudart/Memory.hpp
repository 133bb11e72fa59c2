// Memory of the devices and pinned memory: pages of the host, kept by address.
#pragma once

#include <cuda_runtime_api.h>

namespace emulated {

// Returns the type; cudaMemoryTypeUnregistered for the host's memory that is not pinned.
cudaMemoryType memoryType(const void* address);

}  // namespace emulated
