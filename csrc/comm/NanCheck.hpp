// Refuses to send NaN.
#pragma once

#include "comm/Hooks.hpp"

namespace torchcomms_pg {

// A pre hook: raises RuntimeError, naming operation, rank and tensor, where this rank would send
// NaN. What is recorded into a graph is not looked at, since that would be to wait for a stream.
void refuseNan(const PreHookArgs& args, int rank);

}  // namespace torchcomms_pg
