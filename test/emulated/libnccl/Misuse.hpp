// Misuses: calls that NCCL forbids or that leave it broken. Kept for tests, and printed.
#pragma once

#include <string>

namespace emulated {

void misuse(const std::string& function, const std::string& what);

// Set and return the text of ncclGetLastError for the thread, which NCCL would write as a warning.
void setError(const std::string& text);
const std::string& lastErrorText();

}  // namespace emulated
