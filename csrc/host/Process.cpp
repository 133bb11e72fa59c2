#include "host/Process.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/FileDescriptor.hpp"

namespace torchcomms_pg::host {
namespace {

std::atomic<uint32_t> generation{0};
std::atomic<uint32_t> cachedPid{0};

void setPid() {
  cachedPid.store(static_cast<uint32_t>(getpid()), std::memory_order_relaxed);
}

[[maybe_unused]] const int forkHandler = [] {
  setPid();
  return pthread_atfork(nullptr, nullptr, [] {
    generation.fetch_add(1, std::memory_order_relaxed);
    setPid();
  });
}();

// Reads at most `capacity` - 1 characters of a file under /proc. Returns their number, 0 on
// failure.
size_t readSmallFile(const char* path, char* buffer, size_t capacity) {
  const FileDescriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file) return 0;
  const ssize_t bytes = ::read(file.get(), buffer, capacity - 1);
  buffer[bytes > 0 ? bytes : 0] = '\0';
  return bytes > 0 ? static_cast<size_t>(bytes) : 0;
}

struct ProcessStatus {
  char state = '\0';  // as in proc(5); '\0' if unknown
  uint64_t startTime = 0;
  uint64_t threads = 0;
};

ProcessStatus readStatus(uint32_t pid) {
  // Reads the file of the first thread, whose state and start time are the process's. The process's
  // own file is unreliable: a process that QEMU emulates reads an invented file of itself, and
  // other processes read the true file.
  char path[48];
  std::snprintf(path, sizeof path, "/proc/%u/task/%u/stat", pid, pid);
  char text[1024];
  if (readSmallFile(path, text, sizeof text) == 0) return {};
  // proc(5): pid (name) state ppid ... num_threads is field 20, starttime is field 22. The name may
  // contain blanks and parentheses, too.
  const char* field = std::strrchr(text, ')');
  if (field == nullptr || field[1] != ' ') return {};
  field += 2;
  ProcessStatus status;
  status.state = *field;
  for (int number = 3; number < 22; ++number) {
    field = std::strchr(field, ' ');
    if (field == nullptr) return {};
    ++field;
    if (number + 1 == 20) status.threads = std::strtoull(field, nullptr, 10);
  }
  status.startTime = std::strtoull(field, nullptr, 10);
  return status;
}

}  // namespace

uint32_t processId() {
  return cachedPid.load(std::memory_order_relaxed);
}

bool isOfThisUser(int socket, uint32_t* pid) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return false;
  if (pid != nullptr) *pid = static_cast<uint32_t>(peer.pid);
  return peer.uid == geteuid();
}

uint32_t forkGeneration() {
  return generation.load(std::memory_order_relaxed);
}

uint64_t processStartTime(uint32_t pid) {
  return readStatus(pid).startTime;
}

char processState(uint32_t pid) {
  return readStatus(pid).state;
}

bool processAlive(uint32_t pid, uint64_t startTime) {
  if (pid == processId()) return true;
  if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
  const ProcessStatus now = readStatus(pid);
  // The first thread of a process may end before the others, and is a zombie then, too.
  if (now.state == 'X' || now.state == 'x' || (now.state == 'Z' && now.threads <= 1)) return false;
  return startTime == 0 || now.startTime == 0 || now.startTime == startTime;
}

std::string hostName() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

uint64_t bootHash() {
  char text[64];
  const size_t bytes = readSmallFile("/proc/sys/kernel/random/boot_id", text, sizeof text);
  if (bytes != 0) return hashBytes(text, bytes);
  const std::string host = hostName();
  return hashBytes(host.data(), host.size());
}

uint32_t pidSpace() {
  struct stat status{};
  if (stat("/proc/self/ns/pid", &status) != 0) return 0;
  return static_cast<uint32_t>(status.st_ino);
}

uint64_t hashBytes(const void* data, size_t bytes) {
  // FNV-1a with its standard 64-bit constants.
  uint64_t hash = 14695981039346656037u;
  const auto* byte = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ byte[i]) * 1099511628211u;
  return hash;
}

}  // namespace torchcomms_pg::host
