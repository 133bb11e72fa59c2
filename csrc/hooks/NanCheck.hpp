// The check that refuses to send NaN.
#pragma once

#include "hooks/Hooks.hpp"

namespace torchcomms_pg {

// Raises RuntimeError, which names operation, rank and tensor, if this rank would send NaN. Skips
// operations that a graph captures, since the check would wait for a stream. Use as a pre hook.
void refuseNan(const PreHookArgs& args, int rank);

}  // namespace torchcomms_pg
