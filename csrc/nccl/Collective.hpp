// One rank's part in a collective, as every library takes it.
#pragma once

#include <nccl.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace torchcomms_pg {

enum class CollectiveKind : uint8_t {
  allReduce = 1,
  reduceScatter,
  allGather,
  broadcast,
  reduce,
  allToAll,
  gather,
  scatter,
  // Host libraries alone have these.
  split,
  window,
  barrier,
};

// The identity of a collective. Ranks whose signatures for the same step differ have called
// different collectives. 12 bytes, so that a rank's counters and its history share one cache line.
struct Signature {
  uint8_t kind;   // CollectiveKind
  uint8_t types;  // data type | reduction << 4
  uint16_t root;
  uint32_t countLow;
  uint32_t countHigh;

  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 12);

// A reduction operator, resolved, so that no handle of a library has to live.
struct Operator {
  ncclRedOp_t reduction = ncclSum;
  bool scaled = false;                  // every rank multiplies its input first
  const void* scalarAddress = nullptr;  // read at execution; null if `scalar` is used
  std::array<std::byte, 8> scalar{};    // one element of the collective's type
};

// Buffers and `count` are as in NCCL's function of that name.
struct Collective {
  CollectiveKind kind = CollectiveKind::allReduce;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  int root = 0;
  Operator op{};
  // Signature of the larger collective that this one is a part of, for peers to compare. Null if
  // this collective is not a part: then peers compare its own signature.
  const Signature* whole = nullptr;
};

}  // namespace torchcomms_pg
