// Limits of this process's control groups, such as a container's.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace torchcomms_pg::host {

// Folders of this process's control groups for a controller ("cpu", "memory"), the innermost first;
// see cgroups(7). `v2` is true if the files have the names of version 2.
struct Cgroups {
  bool v2 = true;
  std::vector<std::filesystem::path> folders;
};
Cgroups cgroups(
    const std::string& controller, const std::filesystem::path& membership = "/proc/self/cgroup",
    const std::filesystem::path& mount = "/sys/fs/cgroup");

// Returns the number of CPUs whose time this process may use, rounded up, or INT_MAX if no limit is
// set.
int cpuQuota(const Cgroups& groups);

}  // namespace torchcomms_pg::host
