// Description of one rank's part in a collective, for all libraries, and sizes of NCCL's types.
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
  // Only shared memory and several hosts have these.
  split,
  window,
  barrier,
};

// Returns the size of one element in bytes, or 0 for a type that NCCL does not define.
constexpr size_t elementSize(ncclDataType_t type) {
  constexpr size_t kSizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < ncclNumTypes ? kSizes[type] : 0;
}

// The identity of a collective. Ranks whose signatures for the same step differ have called
// different collectives. 12 bytes, so that a rank's progress, with its last four signatures, fits a
// cache line (shm::Progress).
struct Signature {
  uint8_t kind;       // CollectiveKind
  uint8_t types;      // data type | reduction << 4
  uint16_t root;      // 0 if the collective has no root
  uint32_t countLow;  // Collective::count
  uint32_t countHigh;

  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 12);

// A reduction operator, described by value: no library's handle to it has to be kept.
struct Operator {
  ncclRedOp_t reduction = ncclSum;
  bool scaled = false;                  // each rank first multiplies its input by the scalar
  const void* scalarAddress = nullptr;  // read when the collective runs; null to use `scalar`
  std::array<std::byte, 8> scalar{};    // one element of the collective's type
};

// `input`, `output` and `count` are as in the NCCL function that `kind` names.
struct Collective {
  CollectiveKind kind = CollectiveKind::allReduce;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  int root = 0;
  Operator op{};
  // Signature of the larger collective that this one is a part of. Peers compare it instead of this
  // collective's own signature. Null if this collective is not a part.
  const Signature* whole = nullptr;
};

}  // namespace torchcomms_pg
