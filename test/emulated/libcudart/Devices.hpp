// The GPUs, the current one of a thread, and their contexts.
#pragma once

#include <cstddef>

#include "libcudart/Emulated.hpp"

namespace emulated {

inline constexpr int kDevices = 2;
inline constexpr size_t kDeviceMemory = size_t{4} << 30;

// Makes the primary context of the current device, if it is not there yet. The
// runtime does so in cudaSetDevice, and in the first call that needs one
// (Programming Guide, "Initialization"). Calls on a handle need none: they use
// the handle's.
void needContext(const char* function);

}  // namespace emulated
