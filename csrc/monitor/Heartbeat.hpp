// Notices what the monitor cannot: that its own thread is stuck, or that
// another thread does not give the GIL back. Knows nothing of torch.
#pragma once

#include <chrono>

namespace torchcomms_pg {

struct HeartbeatOptions {
  std::chrono::milliseconds patience{0};  // 0: no watch
  bool endsProcess = false;               // true to end it when the monitor's thread is stuck
};

// Looks from now on, from a thread of its own, as long as the monitor runs. Reports on stderr which
// of the two is the case, once until it is over. A later call changes the options.
void watchOverMonitor(HeartbeatOptions options);

}  // namespace torchcomms_pg
