// Lines on stderr. Knows nothing of torch.
#pragma once

#include <chrono>
#include <string>

namespace torchcomms_pg {

// Prints a line on stderr, after those before it. Does not block: a stderr that nobody reads, since
// the launcher has stopped, holds up whoever writes, so a thread of its own does. Beyond 1 MB that
// wait to be written lines are lost, which a later line tells.
void printLine(const std::string& line);

// Waits until all lines are written. False: `patience` has passed first.
bool awaitPrinted(std::chrono::milliseconds patience);

}  // namespace torchcomms_pg
