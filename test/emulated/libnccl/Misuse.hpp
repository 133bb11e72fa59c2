// What a caller does that NCCL forbids or that leaves it broken. Kept for tests,
// and printed.
#pragma once

#include <string>

namespace emulated {

void misuse(const std::string& function, const std::string& what);

// What ncclGetLastError tells the thread, and NCCL would write as a warning.
void setError(const std::string& text);
const std::string& lastErrorText();

}  // namespace emulated
