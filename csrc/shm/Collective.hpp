// One collective operation as issued by one rank.
#pragma once

#include <nccl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shm/Layout.hpp"

namespace torchcomms_pg::shm {

enum class CollectiveKind : uint8_t {
  allReduce = 1,
  reduceScatter,
  allGather,
  broadcast,
  reduce,
  allToAll,
  gather,
  scatter,
  split,
  window,
  barrier,
};

// A reduction operator, resolved from an ncclRedOp_t when the operation is
// issued, so that the operator may be destroyed at once.
struct Operator {
  ncclRedOp_t reduction = ncclSum;
  bool scaled = false;                  // every rank multiplies its input first
  const void* scalarAddress = nullptr;  // read when the operation executes; null: use `scalar`
  std::array<std::byte, 8> scalar{};
};

struct Collective {
  CollectiveKind kind = CollectiveKind::allReduce;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  Operator op{};
  int root = 0;
  // Of a larger collective that this one is a part of: what peers compare. Null: this one's own.
  const Signature* whole = nullptr;
};

bool hasRoot(CollectiveKind kind);

Signature signatureOf(const Collective& collective);

// Such as "all_reduce(count=4, float32, sum)".
std::string describe(const Signature& signature);

}  // namespace torchcomms_pg::shm
