// Lines on stderr. Independent of torch.
#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace torchcomms_pg {

// Prints a line on stderr, after earlier lines. Does not block: a separate thread writes, since a
// write blocks if nobody reads stderr, for example if the launcher is stopped. If more than 1 MB
// waits to be written, lines are lost, and a later line reports their number.
void printLine(const std::string& line);

// Prints an error in the same way. Does nothing if memory is short.
void printError(const std::exception& error) noexcept;

// Waits until all lines are written. Returns false if `patience` passes first.
bool awaitPrinted(std::chrono::milliseconds patience);

}  // namespace torchcomms_pg
