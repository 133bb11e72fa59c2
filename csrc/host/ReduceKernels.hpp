// The arithmetic for each instruction set.
#pragma once

#include "host/Reduce.hpp"

namespace torchcomms_pg::host {

// Functions with the contracts of Reduce.hpp; `reduce` needs n >= 2.
struct ReduceKernels {
  void (*reduce)(ncclDataType_t, ncclRedOp_t, void*, const void* const*, int, size_t, double) =
      nullptr;
  void (*scale)(ncclDataType_t, void*, const void*, const void*, size_t) = nullptr;
};

// Kernels that every processor of the architecture runs.
extern const ReduceKernels kBaselineKernels;

// Kernels for AVX2 and F16C, or null pointers if the architecture has neither. Callable only on a
// processor that has both.
extern const ReduceKernels kAvx2Kernels;

}  // namespace torchcomms_pg::host
