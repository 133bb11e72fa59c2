// What a process says when SIGTERM is about to end it while it waits for other ranks.
#pragma once

#include "diagnosis/rank/Sigterm.hpp"

namespace torchcomms_pg {

// Prints whom this process waits for, if it waits in an operation that was in flight when the
// signal came, and dumps the flight recorder. For sigterm::install(). Returns half a second after
// the signal at the earliest, since other ranks may ask for this rank's place.
void sayLastWords(const sigterm::Kept& signal);

}  // namespace torchcomms_pg
