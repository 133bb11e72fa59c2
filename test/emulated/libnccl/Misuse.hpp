// Misuses: calls that NCCL forbids or that leave it broken. Kept for tests, and printed.
#pragma once

#include <string>

namespace emulated {

void misuse(const std::string& function, const std::string& what);

// Set and return the text of ncclGetLastError, which NCCL would write as a warning: one for the
// process, the latest of any thread and communicator, never cleared (src/debug.cc, ncclLastError).
void setError(const std::string& text);
const char* lastErrorText();

}  // namespace emulated
