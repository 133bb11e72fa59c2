// Detects what the monitor cannot: that its own thread is stuck, or that another thread does not
// release the GIL. Independent of torch.
#pragma once

#include <chrono>

namespace torchcomms_pg {

struct HeartbeatOptions {
  std::chrono::milliseconds patience{0};  // 0 for no watch
  bool endsProcess = false;  // true to end the process if the monitor's thread is stuck
};

// Starts a thread that looks for both problems as long as the monitor runs. It reports each on
// stderr, once until the problem is over. A later call changes the options.
void watchOverMonitor(HeartbeatOptions options);

}  // namespace torchcomms_pg
