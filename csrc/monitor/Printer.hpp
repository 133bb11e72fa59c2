// Lines on stderr. Independent of torch.
#pragma once

#include <chrono>
#include <string>

namespace torchcomms_pg {

// Prints a line on stderr, after earlier ones. Does not block: a separate thread writes, since a
// stderr that nobody reads, for example of a stopped launcher, blocks the writer. If more than 1 MB
// waits to be written, lines are lost, and a later line reports their number.
void printLine(const std::string& line);

// Waits until all lines are written. Returns false if `patience` passes first.
bool awaitPrinted(std::chrono::milliseconds patience);

}  // namespace torchcomms_pg
