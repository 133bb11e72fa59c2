// Names of operations, types and reductions in error texts.
#pragma once

#include <nccl.h>

#include "host/Signature.hpp"

namespace torchcomms_pg::host {

template <size_t count>
constexpr const char* nameIn(const char* const (&names)[count], int number) {
  return number >= 0 && number < static_cast<int>(count) ? names[number] : "unknown";
}

constexpr const char* kindName(CollectiveKind kind) {
  constexpr const char* kNames[] = {"unknown",   "all_reduce", "reduce_scatter",     "all_gather",
                                    "broadcast", "reduce",     "all_to_all",         "gather",
                                    "scatter",   "commSplit",  "commWindowRegister", "barrier"};
  return nameIn(kNames, static_cast<int>(kind));
}

constexpr const char* typeName(ncclDataType_t type) {
  constexpr const char* kNames[] = {"int8",    "uint8",    "int32",      "uint32",
                                    "int64",   "uint64",   "float16",    "float32",
                                    "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return nameIn(kNames, type);
}

constexpr const char* reductionName(int op) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg"};
  return nameIn(kNames, op);
}

}  // namespace torchcomms_pg::host
