// Functions that the operators share with the module.
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

const at::Generator& defaultGenerator(c10::DeviceIndex device);
at::Generator newGenerator(c10::DeviceIndex device);

// Returns the next seed of a kernel.
uint64_t drawSeed(at::Generator& generator);

}  // namespace simulated
