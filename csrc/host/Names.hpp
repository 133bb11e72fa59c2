// Names of operations, types and reductions in error texts.
#pragma once

#include <nccl.h>

#include "host/Signature.hpp"

namespace torchcomms_pg::host {

constexpr const char* kindName(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::allReduce: return "all_reduce";
    case CollectiveKind::reduceScatter: return "reduce_scatter";
    case CollectiveKind::allGather: return "all_gather";
    case CollectiveKind::broadcast: return "broadcast";
    case CollectiveKind::reduce: return "reduce";
    case CollectiveKind::allToAll: return "all_to_all";
    case CollectiveKind::gather: return "gather";
    case CollectiveKind::scatter: return "scatter";
    case CollectiveKind::split: return "commSplit";
    case CollectiveKind::window: return "commWindowRegister";
    case CollectiveKind::barrier: return "barrier";
  }
  return "unknown";
}

constexpr const char* typeName(ncclDataType_t type) {
  constexpr const char* kNames[] = {"int8",    "uint8",    "int32",      "uint32",
                                    "int64",   "uint64",   "float16",    "float32",
                                    "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return type >= 0 && type < 12 ? kNames[type] : "unknown";
}

constexpr const char* reductionName(int op) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg"};
  return op >= 0 && op < 5 ? kNames[op] : "unknown";
}

}  // namespace torchcomms_pg::host
