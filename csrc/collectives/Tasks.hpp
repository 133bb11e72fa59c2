// Sets tasks of several library calls, and epilogues that copy results to the caller's tensors.
#pragma once

#include <vector>

#include "comm/Communicator.hpp"
#include "operation/Buffers.hpp"

namespace torchcomms_pg {

// Elements that this rank sends to one peer, or receives from it.
struct Part {
  void* data;
  size_t count;
  int peer;
};

// Makes the operation send `sends` and receive `receives` in one group. All elements have `type`.
void setExchange(
    const Communicator& comm, PreparedOp& call, std::vector<Part> sends, std::vector<Part> receives,
    ncclDataType_t type);

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
