// Memory of the devices and pinned memory: pages of the host that are remembered
// by address.
#pragma once

#include <cuda_runtime_api.h>

namespace emulated {

// cudaMemoryTypeUnregistered for what the runtime has not allocated or registered.
cudaMemoryType memoryType(const void* address);

}  // namespace emulated
