#include "shm/segment/UniqueId.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "base/Mutex.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

constexpr char kFileName[] = "torchcomms_pg";

// The memory files that this process has made and holds open.
struct OpenFiles {
  Mutex mutex;
  std::map<Token, FileDescriptor> files GUARDED_BY(mutex);

  // Closes the inherited descriptors; the parent keeps its own.
  void inChild() REQUIRES(mutex) { files.clear(); }
};

OpenFiles& openFiles() {
  return forkSafe<OpenFiles>();
}

[[noreturn]] void refuse(ncclResult_t result, const std::string& text) {
  throw NcclError(result, "commInitRank: " + text);
}

// How a memory file begins, as Header does.
struct Start {
  uint64_t magic;
  Token token;
  bool operator==(const Start&) const = default;
};

uint64_t checksum(const IdContent& content) {
  return hashBytes(&content, offsetof(IdContent, checksum));
}

bool complete(int file) {
  alignas(Header) std::byte bytes[sizeof(Header)];
  if (pread(file, bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) return true;
  const auto& header = *reinterpret_cast<const Header*>(bytes);
  const int32_t ranks = header.ranks;
  return (ranks != 0 && header.joined >= ranks) || header.failed != Recorded::no;
}

}  // namespace

ncclUniqueId makeUniqueId() {
  closeCompletedIds();
  IdContent content{};
  content.magic = kMagic;
  content.token = makeToken();
  content.bootHash = bootHash();
  content.pid = processId();
  content.startTime = processStartTime(content.pid);
  content.user = geteuid();
  content.pidSpace = pidSpace();
  std::snprintf(content.host, sizeof content.host, "%s", hostName().c_str());

  FileDescriptor file{memfd_create(kFileName, MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!file) throw systemFailure("getUniqueId: memfd_create");
  const Start start{kMagic, content.token};
  if (fchmod(file.get(), 0600) != 0 || ftruncate(file.get(), 4096) != 0 ||
      pwrite(file.get(), &start, sizeof start, 0) != sizeof start) {
    throw systemFailure("getUniqueId: preparing shared memory");
  }
  content.file = file.get();
  content.checksum = checksum(content);
  share(content.token, file.get());
  {
    LockGuard lock(openFiles().mutex);
    openFiles().files[content.token] = std::move(file);
  }
  ncclUniqueId id;
  std::memcpy(&id, &content, sizeof id);
  return id;
}

IdContent decode(const ncclUniqueId& id) {
  IdContent content;
  std::memcpy(&content, &id, sizeof content);
  content.host[sizeof content.host - 1] = '\0';
  if (content.checksum != checksum(content)) {
    refuse(
        ncclInvalidArgument,
        "the unique id is corrupt, or was not made by getUniqueId of the shared-memory library");
  }
  if (content.magic != kMagic) {
    refuse(ncclInvalidArgument, "the unique id was made by another version of torchcomms_pg");
  }
  return content;
}

FileDescriptor openMemory(const IdContent& content) {
  const std::string origin = "pid " + std::to_string(content.pid) + " on host " + content.host;
  if (content.bootHash != bootHash()) {
    refuse(
        ncclInvalidUsage, "shared memory joins ranks of one host only: the unique id was made by " +
                              origin + ", this rank runs on host " + hostName());
  }
  if (content.pidSpace != pidSpace()) {
    refuse(
        ncclInvalidUsage, "the unique id was made by " + origin +
                              " in another container (pid namespace) than this rank's");
  }
  if (!processAlive(content.pid, content.startTime)) {
    refuse(ncclRemoteError, "the process that made the unique id has ended: " + origin);
  }
  if (content.user != geteuid()) {
    refuse(
        ncclInvalidUsage, "the unique id was made by user " + std::to_string(content.user) +
                              ", this rank runs as user " + std::to_string(geteuid()));
  }
  const auto path = descriptorPath(content.pid, content.file);
  // The descriptor's number may by now belong to another file, which must not be opened. So the
  // file's name is checked first, and the token in the file after opening.
  char target[64] = {};
  const ssize_t length = readlink(path.c_str(), target, sizeof target - 1);
  const bool seen = length >= 0 || !forbidden(content.pid, errno);
  const std::string expected = std::string("/memfd:") + kFileName;
  const std::string used = "the unique id is no longer open in " + origin +
                           ": all ranks of its communicator have joined, or it has failed";
  if (seen && (length < 0 || std::strncmp(target, expected.c_str(), expected.size()) != 0)) {
    refuse(ncclInvalidUsage, used);
  }
  FileDescriptor file;
  try {
    file = openShared(content.pid, content.file, content.token);
  } catch (const NcclError& failure) {
    refuse(failure.result, failure.what());
  }
  Start start{};
  struct stat status{};
  if (fstat(file.get(), &status) != 0 || status.st_uid != geteuid() ||
      pread(file.get(), &start, sizeof start, 0) != sizeof start ||
      start != Start{kMagic, content.token}) {
    refuse(ncclInvalidUsage, used);
  }
  return file;
}

void closeCompletedIds() {
  std::map<Token, FileDescriptor> closing;
  {
    LockGuard lock(openFiles().mutex);
    auto& files = openFiles().files;
    for (auto next = files.begin(); next != files.end();) {
      const auto file = next++;
      if (complete(file->second.get())) closing.insert(files.extract(file));
    }
  }
  for (const auto& [token, file] : closing) withdraw(token);
}

}  // namespace torchcomms_pg::shm
