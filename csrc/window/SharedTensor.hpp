// Tensors in memory of the library that peers can map.
#pragma once

#include <ATen/core/Tensor.h>

#include "nccl/Library.hpp"

namespace torchcomms_pg {

// Makes a tensor of one dimension, not initialized. `what` names the calling operation in errors.
at::Tensor makeSharedTensor(
    const char* what, const Library& api, int64_t numel, c10::ScalarType dtype, at::Device device);

// Moves the storage of a tensor, and so every tensor that shares it, into memory of the library.
// Does nothing if the storage is already in such memory. Afterwards it cannot be resized, since
// that would move it out again. Waits for the device; no other stream of the device may use the
// tensor during the call.
//
// Frees the former memory with the storage and not at once: a running kernel, or an array made by
// DLPack, may hold its address. So a tensor that was moved takes its size twice.
//
// Throws ValueError for a storage that torch did not allocate or may not move, such as a NumPy
// array's, an mmap's or torch.multiprocessing's.
void moveToShared(const char* what, const Library& api, const at::Tensor& tensor);

}  // namespace torchcomms_pg
