// The check that refuses to send NaN.
#pragma once

#include "comm/Hooks.hpp"

namespace torchcomms_pg {

// Raises RuntimeError, naming operation, rank and tensor, where this rank would send NaN: a pre
// hook. Does not look at operations recorded into a graph, since it would have to wait for a
// stream.
void refuseNan(const PreHookArgs& args, int rank);

}  // namespace torchcomms_pg
