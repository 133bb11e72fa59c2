// Composition of collectives from exchange steps.
#pragma once

#include "shm/Host.hpp"
#include "shm/collective/Exchange.hpp"

namespace torchcomms_pg::shm {

// Executes one collective in the calling thread, as `rank` of `ranks`; blocks until this rank's
// part is done. Throws NcclError.
void execute(Exchange& exchange, const Collective& collective, int rank, int ranks);

// The two halves of execute(). begin() publishes what the peers need from this rank, without
// waiting for them. It returns false, and does nothing, if it would have to wait or the collective
// takes several steps.
bool begin(Exchange& exchange, const Collective& collective, int rank, int ranks);
void complete(Exchange& exchange, const Collective& collective, int rank, int ranks);

// Returns the size up to which an all-reduce or reduce takes one step, in which every rank that
// wants the result reduces everything. The ranks share the work of larger ones.
size_t oneShotBytes(int ranks);

}  // namespace torchcomms_pg::shm
