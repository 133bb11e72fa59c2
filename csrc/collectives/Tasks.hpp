// Sets tasks of several library calls, and epilogues that copy results to the caller's tensors.
#pragma once

#include <vector>

#include "comm/Communicator.hpp"
#include "operation/Buffers.hpp"

namespace torchcomms_pg {

// Elements that this rank sends to one peer, or receives from it.
struct Part {
  void* data;
  int64_t numel;
  int peer;
};

// Describes a collective that only moves elements. `numel`: as NCCL counts them for `kind`.
Collective moving(
    CollectiveKind kind, const void* input, void* output, int64_t numel, c10::ScalarType dtype,
    int root = 0);

// Makes the operation send `sends` and receive `receives` in one group.
void setExchange(
    const Communicator& comm, PreparedOp& call, const std::vector<Part>& sends,
    const std::vector<Part>& receives, c10::ScalarType dtype);

// Makes the operation run collectives, which share one type and one operator, in one group.
void setGrouped(const Communicator& comm, PreparedOp& call, std::vector<Collective> collectives);

// Sets an epilogue that copies the buffer of `target`, OutputBuffer or OutputBuffers, to its
// tensors, if it has a buffer.
template <class Target>
void setCopyBack(PreparedOp& call, const Target& target) {
  if (target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
}
void setCopyBack(PreparedOp& call, const std::vector<OutputBuffer>& targets);

}  // namespace torchcomms_pg
