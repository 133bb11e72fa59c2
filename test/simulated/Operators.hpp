// Functions that the operators share with the module.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>

namespace simulated {

const at::Generator& defaultGenerator(c10::DeviceIndex device);
at::Generator newGenerator(c10::DeviceIndex device);

// Returns the next seed of a kernel.
uint64_t drawSeed(at::Generator& generator);

// Gives the storage new memory of that size, with its old content.
void resizeStorage(const c10::Storage& storage, size_t bytes);

}  // namespace simulated
