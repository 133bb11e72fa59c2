// Runs collectives as sequences of Exchange's steps.
#pragma once

#include "shm/Host.hpp"
#include "shm/collective/Exchange.hpp"

namespace torchcomms_pg::shm {

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
