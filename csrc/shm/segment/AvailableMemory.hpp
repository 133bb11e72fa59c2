// Memory that this process may still take.
#pragma once

#include <cstddef>
#include <string>

namespace torchcomms_pg::shm {

struct AvailableMemory {
  size_t bytes;       // the largest size_t where nothing is known
  std::string where;  // what sets this limit, e.g. "the system"
};

// Returns the least of what the system has available, and of what the limits of the process's
// memory cgroup and of those around it leave. Beyond the first nothing more may come, beyond the
// others the system ends processes of the group. `root`: folder in place of "/", for tests.
AvailableMemory availableMemory(const std::string& root = "");

}  // namespace torchcomms_pg::shm
