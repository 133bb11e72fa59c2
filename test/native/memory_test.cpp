// Memory: how much a process may take, how it is shared, and registration while memory is freed.
#include <sched.h>
#include <sys/mount.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "Ranks.hpp"
#include "host/Limits.hpp"
#include "nccl/Allocator.hpp"

using namespace test;
using torchcomms_pg::Library;
using torchcomms_pg::NcclApi;
using torchcomms_pg::Registrations;
using torchcomms_pg::host::availableMemory;

namespace {

// A folder in place of "/", with the files that are written.
struct Root {
  std::filesystem::path folder;

  Root() {
    char name[] = "/tmp/torchcomms_pg_root_XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    folder = name;
    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n");
  }
  ~Root() { std::filesystem::remove_all(folder); }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((folder / path).parent_path());
    std::ofstream(folder / path) << text;
  }
  // A mount of a hierarchy, whose top is `top`, and this process's group.
  void mount(const std::string& type, const std::string& top, const std::string& group) const {
    const bool second = type == "cgroup2";
    write(
        "proc/self/mountinfo", "30 23 0:5 / /proc rw - proc proc rw\n31 23 0:28 " + top +
                                   " /groups rw,relatime shared:9 - " + type + " cgroup rw" +
                                   (second ? "" : ",memory") + "\n");
    write(
        "proc/self/cgroup",
        second ? "1:cpu:/elsewhere\n0::" + group + "\n" : "4:cpu,memory:" + group + "\n0::/\n");
  }
  void second(const std::string& group, const std::string& limit, size_t used, size_t files) const {
    write("groups/" + group + "/memory.max", limit + "\n");
    write("groups/" + group + "/memory.current", std::to_string(used) + "\n");
    write(
        "groups/" + group + "/memory.stat",
        "anon 1\ninactive_file " + std::to_string(files) + "\nactive_file 0\nunevictable 5\n");
  }
  void first(const std::string& group, const std::string& limit, size_t used, size_t files) const {
    write("groups/" + group + "/memory.limit_in_bytes", limit + "\n");
    write("groups/" + group + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    write(
        "groups/" + group + "/memory.stat",
        "inactive_file 9\ntotal_inactive_file 0\ntotal_active_file " + std::to_string(files) +
            "\n");
  }
  void expect(size_t bytes, const std::string& where) const {
    const auto available = availableMemory(folder);
    CHECK_EQUAL(available.bytes, bytes);
    CHECK_EQUAL(available.where, where);
  }
};

const std::string kNone = "9223372036854771712";  // of the first version

}  // namespace

TEST(withoutGroupsTheSystemLimitsMemory) {
  const Root root;
  root.expect(8000 << 10, "the system");
  root.mount("cgroup2", "/", "/job/rank");
  root.expect(8000 << 10, "the system");
  root.second("job/rank", "max", 5'000'000, 0);
  root.expect(8000 << 10, "the system");
  std::filesystem::remove_all(root.folder / "proc");
  CHECK_EQUAL(availableMemory(root.folder).bytes, SIZE_MAX);
}

TEST(everyGroupAroundTheProcessLimitsMemory) {
  const Root root;
  root.mount("cgroup2", "/", "/job/rank");
  root.second("job/rank", "3000000", 1'000'000, 400'000);
  root.expect(2'400'000, "the memory cgroup /groups/job/rank");
  root.second("job", "5000000", 4'000'000, 0);
  root.expect(1'000'000, "the memory cgroup /groups/job");
  root.second("", "900000", 1'000'000, 50'000);
  root.expect(0, "the memory cgroup /groups");
}

TEST(theFirstVersionOfGroupsLimitsMemoryToo) {
  const Root root;
  root.mount("cgroup", "/", "/job/rank");
  root.first("job/rank", kNone, 1'000'000, 0);
  root.expect(8000 << 10, "the system");
  root.first("job", "3000000", 1'000'000, 300'000);
  root.expect(2'300'000, "the memory cgroup /groups/job");
}

TEST(aGroupIsFoundWhereAContainerSeesAPartOfTheHierarchy) {
  const Root root;
  root.second("", "3000000", 1'000'000, 0);
  root.second("rank", "2000000", 1'000'000, 0);
  root.mount("cgroup2", "/docker/1", "/docker/1");
  root.expect(2'000'000, "the memory cgroup /groups");
  root.mount("cgroup2", "/docker/1", "/docker/1/rank");
  root.expect(1'000'000, "the memory cgroup /groups/rank");
  for (const std::string outside : {"/docker/12/rank", "/", "/../other", "/.."}) {
    root.mount("cgroup2", "/docker/1", outside);
    root.expect(2'000'000, "the memory cgroup /groups");
    root.mount("cgroup2", "/", outside[1] == '.' ? outside : "/");
    root.expect(2'000'000, "the memory cgroup /groups");
  }
}

TEST(memoryIsFreedWhileOtherMemoryWaitsForTheRanksThatRegisterIt) {
  static std::promise<void> registering, freed;
  NcclApi table = nccl();
  table.commRegister = [](ncclComm_t, void*, size_t, void**) { return ncclSuccess; };
  table.commDeregister = [](ncclComm_t, void*) { return ncclSuccess; };
  table.commWindowRegister = [](ncclComm_t, void*, size_t, ncclWindow_t*, int) {
    registering.set_value();
    freed.get_future().wait();
    return ncclSuccess;
  };
  const Library library(table);
  Registrations registrations(library);
  char memory[2];
  CHECK_NCCL(registrations.add(nullptr, {1, 0}, {&memory[0], 1}, false));
  std::thread adding(
      [&] { CHECK_NCCL(registrations.add(nullptr, {1, 0}, {&memory[1], 1}, true)); });
  registering.get_future().wait();
  Registrations::released(&memory[0]);
  freed.set_value();
  adding.join();
  registrations.forget();
}

TEST(memoryIsSharedWhereTheSystemSealsItAgainstExecution) {
  // The setting is one of a namespace for processes, which needs its own /proc.
  if (unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) return;  // needs privileges
  Processes processes;
  processes.start([] {
    CHECK(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    CHECK(mount("proc", "/proc", "proc", 0, nullptr) == 0);
    std::ofstream setting("/proc/sys/vm/memfd_noexec");
    if (!(setting << 1 << std::flush)) return;  // Linux before 6.3
    processRanks(2, [](ncclComm_t comm, int) { CHECK_NCCL(barrier(comm)); });
  });
  processes.joinAll();
}
