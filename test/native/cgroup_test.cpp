// What a container may use.
#include <climits>
#include <filesystem>
#include <fstream>
#include <string>

#include "Check.hpp"
#include "host/Limits.hpp"

using namespace torchcomms_pg::host;
namespace fs = std::filesystem;

namespace {

// A folder with the files that the kernel has at other places.
struct Files {
  Files() {
    std::string name = (fs::temp_directory_path() / "cgroup_XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    root = name;
  }
  ~Files() { fs::remove_all(root); }
  void write(const fs::path& path, const std::string& text) const {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  }
  int quota() const { return cpuQuota(root); }
  fs::path root;
};

}  // namespace

TEST(theLeastCpuQuotaOfAGroupAndThoseAroundItCounts) {
  const Files files;
  CHECK_EQUAL(files.quota(), INT_MAX);
  files.write("proc/self/cgroup", "0::/pod/main\n");
  files.write("proc/self/mountinfo", "31 23 0:28 / /mount rw - cgroup2 cgroup rw\n");
  CHECK_EQUAL(files.quota(), INT_MAX);
  files.write("mount/pod/main/cpu.max", "max 100000\n");
  CHECK_EQUAL(files.quota(), INT_MAX);
  files.write("mount/cpu.max", "800000 100000\n");
  CHECK_EQUAL(files.quota(), 8);
  files.write("mount/pod/cpu.max", "150000 100000\n");
  CHECK_EQUAL(files.quota(), 2);  // one and a half
}

TEST(cpuQuotasOfVersionOneAreFoundInsideAContainer) {
  const Files files;
  files.write("proc/self/cgroup", "3:memory:/\n2:cpu,cpuacct:/docker/of/the/host\n0::/\n");
  files.write(
      "proc/self/mountinfo",
      "31 23 0:28 /docker/of/the/host /mount/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  files.write("mount/cpu/cpu.cfs_quota_us", "-1\n");
  files.write("mount/cpu/cpu.cfs_period_us", "100000\n");
  files.write("mount/cpu.max", "100000 100000\n");  // nobody looks at it
  CHECK_EQUAL(files.quota(), INT_MAX);
  files.write("mount/cpu/cpu.cfs_quota_us", "300000\n");
  CHECK_EQUAL(files.quota(), 3);
}
