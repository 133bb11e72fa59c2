// Detects two problems that the monitor cannot detect: its own thread is stuck, or a thread does
// not release the GIL. Independent of torch.
#pragma once

#include <chrono>

namespace torchcomms_pg {

struct HeartbeatOptions {
  std::chrono::milliseconds patience{0};  // time until a problem is reported; 0 for no watch
  bool endsProcess = false;  // true to end the process if the monitor's thread is stuck
};

// Starts a thread that looks for both problems while the monitor runs. The thread reports a problem
// once on stderr, and again only after the problem was over. A later call changes the options.
void watchOverMonitor(HeartbeatOptions options);

}  // namespace torchcomms_pg
