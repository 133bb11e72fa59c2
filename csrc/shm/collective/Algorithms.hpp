// How each collective is made of exchange steps.
#pragma once

#include "shm/Host.hpp"
#include "shm/collective/Exchange.hpp"

namespace torchcomms_pg::shm {

// Executes one collective in the calling thread, as `rank` of `ranks`; blocks
// until this rank's part is done. Throws Failure.
void execute(Exchange& exchange, const Collective& collective, int rank, int ranks);

// The two halves of execute(). The first gives the peers what they need of this rank, without
// waiting for anybody; false: it would have to wait, or there is more than one step to it, and
// nothing has been done.
bool begin(Exchange& exchange, const Collective& collective, int rank, int ranks);
void complete(Exchange& exchange, const Collective& collective, int rank, int ranks);

// All-reduces and reduces up to this size take one step, in which every rank
// that wants the result reduces everything; larger ones share the work.
size_t oneShotBytes(int ranks);

}  // namespace torchcomms_pg::shm
