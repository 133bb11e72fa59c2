// Tasks of more than one call, and the copies back of their results.
#pragma once

#include <vector>

#include "comm/Communicator.hpp"
#include "operation/Buffers.hpp"

namespace torchcomms_pg {

// Elements that are sent to one peer or received from it.
struct Part {
  void* data;
  size_t count;
  int peer;
};

// Has the operation send `sends` and receive `receives`, of `type`, in one group.
void setExchange(
    const Communicator& comm,
    PreparedOp& call,
    std::vector<Part> sends,
    std::vector<Part> receives,
    ncclDataType_t type);

// Has the operation run collectives of one type and one operator in one group.
void setGrouped(const Communicator& comm, PreparedOp& call, std::vector<Collective> collectives);

// Has the operation copy the buffer of `target`, an OutputBuffer or OutputBuffers, to its tensors
// if it has one.
template <class Target>
void setCopyBack(PreparedOp& call, const Target& target) {
  if (target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
}
void setCopyBack(PreparedOp& call, const std::vector<OutputBuffer>& targets);

}  // namespace torchcomms_pg
