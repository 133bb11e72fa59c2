// Tensors in memory that the library allocates and peers can map.
#pragma once

#include <ATen/core/Tensor.h>

#include "nccl/Library.hpp"

namespace torchcomms_pg {

// Returns a new one-dimensional tensor, not initialized, in memory of the library. `what` names the
// calling operation in errors.
at::Tensor makeSharedTensor(
    const char* what, const Library& api, int64_t numel, c10::ScalarType dtype, at::Device device);

// Moves the storage of a tensor, and so every tensor with that storage, into memory of the library.
// Does nothing if the storage is in such memory. Afterwards the storage cannot be resized, since a
// resize would move it out again. Waits for the device; meanwhile no other stream may use the
// tensor.
//
// Frees the former memory only with the storage: a running kernel, or an array made by DLPack, may
// hold its address. So a moved tensor takes twice its size.
//
// Throws ValueError for a storage that torch did not allocate or may not move, such as a NumPy
// array's, an mmap's or torch.multiprocessing's.
void moveToShared(const char* what, const Library& api, const at::Tensor& tensor);

}  // namespace torchcomms_pg
