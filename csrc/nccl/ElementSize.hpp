// Sizes of NCCL's data types.
#pragma once

#include <nccl.h>

#include <cstddef>

namespace torchcomms_pg {

// Returns the size of one element in bytes, or 0 for a type that NCCL does not define.
constexpr size_t elementSize(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclNumTypes: break;
  }
  return 0;
}

}  // namespace torchcomms_pg
