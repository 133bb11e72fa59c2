// Tensors in memory of the library, which peers can map.
#pragma once

#include <ATen/core/Tensor.h>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Makes a tensor of one dimension, not initialized. `what`: the calling operation, for errors.
at::Tensor makeSharedTensor(
    const char* what, const NcclApi& api, int64_t numel, c10::ScalarType dtype, at::Device device);

// Moves the storage of a tensor, and so every tensor that shares it, into memory of the library;
// does nothing where it is there already. It stays there and cannot be resized any more, which
// would move it out again. Waits for the device, whose other streams may not use the tensor
// meanwhile.
//
// Frees the former memory with the storage and not now: a kernel that runs, or an array made by
// DLPack, may hold its address. So a tensor that was moved costs its size twice.
//
// Throws ValueError for a storage that torch did not allocate or may not move: that of a NumPy
// array, of an mmap, of torch.multiprocessing.
void moveToShared(const char* what, const NcclApi& api, const at::Tensor& tensor);

}  // namespace torchcomms_pg
