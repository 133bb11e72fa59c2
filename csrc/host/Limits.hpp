// How much memory and CPU time this process may take, for example in a container.
#pragma once

#include <cstddef>
#include <string>

namespace torchcomms_pg::host {

struct AvailableMemory {
  size_t bytes;       // SIZE_MAX if unknown
  std::string where;  // what sets the limit, for error texts, such as "the system"
};

// Returns the least of the memory that the system has available and the memory that the limits of
// this process's memory cgroup and its parents leave. Beyond the system's memory an allocation may
// fail; beyond a cgroup's limit, the system kills processes of the group. `root` is a folder that
// tests use in place of "/".
AvailableMemory availableMemory(const std::string& root = "");

// Returns the number of CPUs whose time this process may use, rounded up, or INT_MAX if no limit is
// set.
int cpuQuota(const std::string& root = "");

}  // namespace torchcomms_pg::host
