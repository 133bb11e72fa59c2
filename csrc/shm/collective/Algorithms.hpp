// Runs collectives as sequences of Exchange's steps.
#pragma once

#include "shm/Host.hpp"
#include "shm/collective/Exchange.hpp"

namespace torchcomms_pg::shm {

// Which parts of their buffers the ranks give each other in a collective.
struct Shape {
  bool reduces = false;
  bool fromRoot = false;       // only the root has an input
  bool toRoot = false;         // only the root gets an output
  bool inputInParts = false;   // an input has a part for each rank
  bool outputInParts = false;  // an output has a part of each rank
};

// Returns the shape of the collectives of a kind; of one that moves no data, all is false.
constexpr Shape shapeOf(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::allReduce: return {.reduces = true};
    case CollectiveKind::reduce: return {.reduces = true, .toRoot = true};
    case CollectiveKind::reduceScatter: return {.reduces = true, .inputInParts = true};
    case CollectiveKind::allGather: return {.outputInParts = true};
    case CollectiveKind::allToAll: return {.inputInParts = true, .outputInParts = true};
    case CollectiveKind::broadcast: return {.fromRoot = true};
    case CollectiveKind::gather: return {.toRoot = true, .outputInParts = true};
    case CollectiveKind::scatter: return {.fromRoot = true, .inputInParts = true};
    default: return {};
  }
}

// Executes one collective in the calling thread, as `rank` of `ranks`; blocks until this rank's
// part is done. Throws NcclError.
void execute(Exchange& exchange, const Collective& collective, int rank, int ranks);

// The two halves of execute(). begin() publishes this rank's data and returns true. It does nothing
// and returns false if it would have to wait, or if the collective takes several steps or much
// data. complete() blocks until this rank's part is done. Both throw NcclError.
bool begin(Exchange& exchange, const Collective& collective, int rank, int ranks);
void complete(Exchange& exchange, const Collective& collective, int rank, int ranks);

// Returns the number of bytes up to which an all-reduce or reduce takes one step. In this step
// every rank that wants the result reduces all inputs. For more bytes, the ranks share the work.
size_t oneShotBytes(int ranks);

}  // namespace torchcomms_pg::shm
