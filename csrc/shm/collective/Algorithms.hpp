// Composition of collectives from exchange steps.
#pragma once

#include "shm/Host.hpp"
#include "shm/collective/Exchange.hpp"

namespace torchcomms_pg::shm {

// Executes one collective in the calling thread, as `rank` of `ranks`; blocks until this rank's
// part is done. Throws NcclError.
void execute(Exchange& exchange, const Collective& collective, int rank, int ranks);

// The two halves of execute(). begin() publishes what the peers need of this rank, without waiting
// for any of them; it returns false, with nothing done, if it would have to wait or the collective
// takes more than one step.
bool begin(Exchange& exchange, const Collective& collective, int rank, int ranks);
void complete(Exchange& exchange, const Collective& collective, int rank, int ranks);

// Returns the size up to which all-reduces and reduces take one step, in which every rank that
// wants the result reduces everything; larger ones share the work.
size_t oneShotBytes(int ranks);

}  // namespace torchcomms_pg::shm
