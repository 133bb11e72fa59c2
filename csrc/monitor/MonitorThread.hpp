// The role of the monitor's thread.
#pragma once

#include "base/ThreadRole.hpp"

namespace torchcomms_pg {

inline constexpr ThreadRole monitorThread;

}  // namespace torchcomms_pg
