// The check that refuses to send NaN.
#pragma once

#include "comm/Hooks.hpp"

namespace torchcomms_pg {

// Raises RuntimeError with operation, rank and tensor if this rank would send NaN. Use as a pre
// hook. Skips operations that are captured into a graph, since the check would wait for a stream.
void refuseNan(const PreHookArgs& args, int rank);

}  // namespace torchcomms_pg
