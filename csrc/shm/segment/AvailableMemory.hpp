// Memory that this process may still take.
#pragma once

#include <cstddef>
#include <string>

namespace torchcomms_pg::shm {

struct AvailableMemory {
  size_t bytes;       // the largest size_t if unknown
  std::string where;  // what sets this limit, e.g. "the system"
};

// Returns the least of what the system has available, and what the limits of the process's memory
// cgroup and its parents leave. A process that takes more than the system has may get nothing;
// beyond a cgroup's limit, the system ends processes of the group. `root`: folder in place of "/",
// for tests.
AvailableMemory availableMemory(const std::string& root = "");

}  // namespace torchcomms_pg::shm
