#include "host/Limits.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <vector>

#include "base/TextStreams.hpp"

namespace torchcomms_pg::host {
namespace {

// A control group to which this process belongs, see cgroups(7).
struct Cgroup {
  bool v2;             // true if the files have the names of version 2
  std::string folder;  // does not exist, and so sets no limit, if this process cannot see the group
};

bool lists(const std::string& names, const std::string& name) {
  return ("," + names + ",").find("," + name + ",") != std::string::npos;
}

// Returns the path of this process's group below `top`, or "" for `top` itself. `controller`: "" in
// version 2, which has one hierarchy for all.
std::string groupBelow(
    const std::string& top, const std::string& controller, const std::string& root) {
  // Each line is number:controllers:path.
  std::ifstream lines(root + "/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto names = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? !names.empty() : !lists(names, controller)) continue;
    auto path = line.substr(second + 1);
    // In a container the path may begin with the host's groups, which are not visible. The part up
    // to the mounted group is left out.
    if (top != "/") {
      path = path.starts_with(top + "/") ? path.substr(top.size()) : "";
    }
    return path == "/" || path.find("/..") != std::string::npos ? "" : path;
  }
  return "";
}

// Returns this process's group for the controller ("cpu", "memory") and the groups around it.
std::vector<Cgroup> cgroups(const std::string& controller, const std::string& root) {
  std::vector<Cgroup> found;
  std::ifstream lines(root + "/proc/self/mountinfo");  // see proc(5)
  for (std::string line; std::getline(lines, line);) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    TextReader before(line), after(line.substr(dash + 3));
    std::string skipped, top, folder, type, options;
    before >> skipped >> skipped >> skipped >> top >> folder;
    after >> type >> skipped >> options;
    const bool v2 = type == "cgroup2";
    if (!v2 && (type != "cgroup" || !lists(options, controller))) continue;
    for (auto group = groupBelow(top, v2 ? "" : controller, root);;
         group.resize(group.rfind('/'))) {
      found.push_back({v2, folder + group});
      if (group.empty()) break;
    }
  }
  return found;
}

// Returns the number in the file, or SIZE_MAX if the file is missing or contains "max".
size_t numberIn(const std::string& path) {
  size_t number = SIZE_MAX;
  return std::ifstream(path) >> number ? number : SIZE_MAX;
}

// Returns how much memory the limit of a group leaves. `folder`: the group's, with a slash.
size_t memoryLeft(bool v2, const std::string& folder) {
  const size_t limit = numberIn(folder + (v2 ? "memory.max" : "memory.limit_in_bytes"));
  size_t used = numberIn(folder + (v2 ? "memory.current" : "memory.usage_in_bytes"));
  if (limit == SIZE_MAX || used == SIZE_MAX) return SIZE_MAX;
  const std::string prefix = v2 ? "" : "total_";
  std::ifstream lines(folder + "memory.stat");
  std::string name;
  for (size_t bytes = 0; lines >> name >> bytes;) {
    // Cached files, which the kernel drops first.
    if (name == prefix + "inactive_file" || name == prefix + "active_file") {
      used -= std::min(used, bytes);
    }
  }
  return limit - std::min(limit, used);
}

}  // namespace

AvailableMemory availableMemory(const std::string& root) {
  AvailableMemory least{SIZE_MAX, "the system"};
  std::ifstream lines(root + "/proc/meminfo");
  std::string name, unit;
  for (size_t kibibytes = 0; lines >> name >> kibibytes; std::getline(lines, unit)) {
    if (name == "MemAvailable:") least.bytes = kibibytes << 10;
  }
  for (const auto& group : cgroups("memory", root)) {
    const size_t bytes = memoryLeft(group.v2, root + group.folder + "/");
    if (bytes < least.bytes) least = {bytes, "the memory cgroup " + group.folder};
  }
  return least;
}

int cpuQuota(const std::string& root) {
  double least = INT_MAX;
  for (const auto& group : cgroups("cpu", root)) {
    const auto folder = root + group.folder + "/";
    double quota = 0;
    double period = 0;
    if (group.v2) {
      std::ifstream(folder + "cpu.max") >> quota >> period;  // "max" is no number
    } else {
      std::ifstream(folder + "cpu.cfs_quota_us") >> quota;  // -1 if unlimited
      std::ifstream(folder + "cpu.cfs_period_us") >> period;
    }
    if (quota > 0 && period > 0) least = std::min(least, std::ceil(quota / period));
  }
  return static_cast<int>(least);
}

}  // namespace torchcomms_pg::host
