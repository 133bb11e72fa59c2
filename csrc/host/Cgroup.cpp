#include "host/Cgroup.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <fstream>

#include "base/TextStreams.hpp"

namespace torchcomms_pg::host {

namespace fs = std::filesystem;

Cgroups cgroups(const std::string& controller, const fs::path& membership, const fs::path& mount) {
  // Each line is number:controllers:path; version 2 has number 0 and no controllers.
  Cgroups groups;
  fs::path place;
  fs::path inside;
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) {
    TextReader parts(line);
    std::string number, controllers, path;
    if (!std::getline(parts, number, ':') || !std::getline(parts, controllers, ':') ||
        !std::getline(parts, path)) {
      continue;
    }
    if (("," + controllers + ",").find("," + controller + ",") != std::string::npos) {
      groups.v2 = false;
      place = mount / controller;
      inside = path;
      break;
    }
    if (controllers.empty()) {
      place = mount;
      inside = path;
    }
  }
  // Inside a container the path may begin with the host's groups, while `mount` is the container's
  // own group. A folder that does not exist has no files, and so sets no limit.
  for (inside = inside.relative_path(); !place.empty(); inside = inside.parent_path()) {
    groups.folders.push_back(place / inside);
    if (inside.empty()) {
      break;
    }
  }
  return groups;
}

int cpuQuota(const Cgroups& groups) {
  double least = INT_MAX;
  for (const auto& folder : groups.folders) {
    double quota = 0;
    double period = 0;
    if (groups.v2) {
      std::ifstream(folder / "cpu.max") >> quota >> period;  // "max" is no number
    } else {
      std::ifstream(folder / "cpu.cfs_quota_us") >> quota;  // -1 if unlimited
      std::ifstream(folder / "cpu.cfs_period_us") >> period;
    }
    if (quota > 0 && period > 0) {
      least = std::min(least, std::ceil(quota / period));
    }
  }
  return static_cast<int>(least);
}

}  // namespace torchcomms_pg::host
