#include "host/AvailableMemory.hpp"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "base/TextStreams.hpp"

namespace torchcomms_pg::host {
namespace {

// Names of the files and lines in one version of cgroups.
struct Version {
  const char* limit;
  const char* used;
  const char* files[2];  // lines of memory.stat for cached files, which the kernel drops first
};
constexpr Version kFirst{
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
constexpr Version kSecond{"memory.max", "memory.current", {"inactive_file", "active_file"}};

// A mounted hierarchy of cgroups that may limit memory.
struct Mount {
  const Version* version;
  std::string root;    // the group mounted at `folder`
  std::string folder;  // the mount point
};

bool lists(const std::string& names, const std::string& name) {
  return ("," + names + ",").find("," + name + ",") != std::string::npos;
}

// Returns the mounts that may limit memory; see proc(5), /proc/[pid]/mountinfo.
std::vector<Mount> mounts(const std::string& root) {
  std::vector<Mount> found;
  std::ifstream lines(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(lines, line);) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    TextReader before(line), after(line.substr(dash + 3));
    std::string skipped, type, options;
    Mount mount;
    before >> skipped >> skipped >> skipped >> mount.root >> mount.folder;
    after >> type >> skipped >> options;
    if (type == "cgroup2") {
      mount.version = &kSecond;
    } else if (type == "cgroup" && lists(options, "memory")) {
      mount.version = &kFirst;
    } else {
      continue;
    }
    found.push_back(mount);
  }
  return found;
}

// Returns the path of this process's group below mount.root, see cgroups(7), or "" for mount.root
// itself.
std::string groupOf(const std::string& root, const Mount& mount) {
  std::ifstream lines(root + "/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto names = line.substr(first + 1, second - first - 1);
    if (mount.version == &kSecond ? !names.empty() : !lists(names, "memory")) continue;
    auto path = line.substr(second + 1);
    // In a container the path may begin with the host's groups, which are not visible. The part up
    // to the mounted group is left out.
    if (mount.root != "/") {
      path = path.rfind(mount.root + "/", 0) == 0 ? path.substr(mount.root.size()) : "";
    }
    return path == "/" || path.find("/..") != std::string::npos ? "" : path;
  }
  return "";
}

// Returns the number in the file, or SIZE_MAX if the file is missing or contains "max".
size_t numberIn(const std::string& path) {
  size_t number = SIZE_MAX;
  return std::ifstream(path) >> number ? number : SIZE_MAX;
}

size_t left(const Version& version, const std::string& folder) {
  const size_t limit = numberIn(folder + "/" + version.limit);
  size_t used = numberIn(folder + "/" + version.used);
  if (limit == SIZE_MAX || used == SIZE_MAX) return SIZE_MAX;
  std::ifstream lines(folder + "/memory.stat");
  std::string name;
  for (size_t bytes = 0; lines >> name >> bytes;) {
    if (name == version.files[0] || name == version.files[1]) used -= std::min(used, bytes);
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
  for (const Mount& mount : mounts(root)) {
    for (auto group = groupOf(root, mount);; group.resize(group.rfind('/'))) {
      const size_t bytes = left(*mount.version, root + mount.folder + group);
      if (bytes < least.bytes) least = {bytes, "the memory cgroup " + mount.folder + group};
      if (group.empty()) break;
    }
  }
  return least;
}

}  // namespace torchcomms_pg::host
