#include "shm/segment/UniqueId.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/Mutex.hpp"
#include "shm/Host.hpp"
#include "shm/segment/Descriptor.hpp"
#include "shm/segment/ForkSafe.hpp"
#include "shm/segment/Layout.hpp"

namespace torchcomms_pg::shm {
namespace {

constexpr char kFileName[] = "torchcomms_pg";

// The memory files that this process has made and holds open.
struct OpenFiles {
  struct File {
    int number;
    Token token;
  };
  Mutex mutex;
  std::vector<File> files GUARDED_BY(mutex);

  // Closes the inherited descriptors; the parent keeps its own.
  void inChild() REQUIRES(mutex) {
    for (const File& file : files) ::close(file.number);
    files.clear();
  }
};

OpenFiles& openFiles() {
  return forkSafe<OpenFiles>();
}

std::string systemError(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

uint64_t checksum(const IdContent& content) {
  return hashBytes(&content, offsetof(IdContent, checksum));
}

bool complete(int file) {
  alignas(Header) std::byte bytes[sizeof(Header)];
  if (pread(file, bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) return true;
  int32_t ranks, joined;
  Recorded failed;
  std::memcpy(&ranks, bytes + offsetof(Header, ranks), sizeof ranks);
  std::memcpy(&joined, bytes + offsetof(Header, joined), sizeof joined);
  std::memcpy(&failed, bytes + offsetof(Header, failed), sizeof failed);
  return (ranks != 0 && joined >= ranks) || failed != Recorded::no;
}

}  // namespace

ncclUniqueId makeUniqueId() {
  closeCompletedIds();
  IdContent content{};
  content.magic = kMagic;
  const Token token = makeToken();
  std::copy(token.begin(), token.end(), content.token);
  content.bootHash = bootHash();
  content.pid = processId();
  content.startTime = processStartTime(content.pid);
  content.user = geteuid();
  content.pidSpace = pidSpace();
  std::snprintf(content.host, sizeof content.host, "%s", hostName().c_str());

  const int file = memfd_create(kFileName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) throw NcclError(ncclSystemError, systemError("getUniqueId: memfd_create"));
  const uint64_t start[3] = {kMagic, content.token[0], content.token[1]};
  if (fchmod(file, 0600) != 0 || ftruncate(file, 4096) != 0 ||
      pwrite(file, start, sizeof start, 0) != sizeof start) {
    const std::string text = systemError("getUniqueId: preparing shared memory");
    ::close(file);
    throw NcclError(ncclSystemError, text);
  }
  content.file = file;
  content.checksum = checksum(content);
  try {
    share(token, file);
  } catch (...) {
    ::close(file);
    throw;
  }
  {
    LockGuard lock(openFiles().mutex);
    openFiles().files.push_back({file, token});
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
    throw NcclError(
        ncclInvalidArgument,
        "commInitRank: the unique id is corrupt, or was not made by getUniqueId of the "
        "shared-memory library");
  }
  if (content.magic != kMagic) {
    throw NcclError(
        ncclInvalidArgument,
        "commInitRank: the unique id was made by another version of torchcomms_pg");
  }
  return content;
}

int openUniqueId(const ncclUniqueId& id) {
  const IdContent content = decode(id);
  const std::string origin = "pid " + std::to_string(content.pid) + " on host " + content.host;
  if (content.bootHash != bootHash()) {
    throw NcclError(
        ncclInvalidUsage,
        "commInitRank: shared memory joins ranks of one host only: the unique id was made by " +
            origin + ", this rank runs on host " + hostName());
  }
  if (content.pidSpace != pidSpace()) {
    throw NcclError(
        ncclInvalidUsage, "commInitRank: the unique id was made by " + origin +
                              " in another container (pid namespace) than this rank's");
  }
  if (!processAlive(content.pid, content.startTime)) {
    throw NcclError(
        ncclRemoteError, "commInitRank: the process that made the unique id has ended: " + origin);
  }
  if (content.user != geteuid()) {
    throw NcclError(
        ncclInvalidUsage, "commInitRank: the unique id was made by user " +
                              std::to_string(content.user) + ", this rank runs as user " +
                              std::to_string(geteuid()));
  }
  const auto path = descriptorPath(content.pid, content.file);
  // The descriptor's number may by now belong to another file, which must not be opened. So the
  // file's name is checked first, and the token in the file after opening.
  char target[64] = {};
  const ssize_t length = readlink(path.c_str(), target, sizeof target - 1);
  const bool seen = length >= 0 || !forbidden(content.pid, errno);
  const std::string expected = std::string("/memfd:") + kFileName;
  const std::string used = "commInitRank: the unique id is no longer open in " + origin +
                           ": all ranks of its communicator have joined, or it has failed";
  if (seen && (length < 0 || std::strncmp(target, expected.c_str(), expected.size()) != 0)) {
    throw NcclError(ncclInvalidUsage, used);
  }
  int file = -1;
  try {
    file = openShared(content.pid, content.file, {content.token[0], content.token[1]});
  } catch (const NcclError& failure) {
    throw NcclError(failure.result, std::string("commInitRank: ") + failure.what());
  }
  uint64_t start[3] = {};
  struct stat status{};
  const bool same = fstat(file, &status) == 0 && status.st_uid == geteuid() &&
                    pread(file, start, sizeof start, 0) == sizeof start && start[0] == kMagic &&
                    start[1] == content.token[0] && start[2] == content.token[1];
  if (!same) {
    ::close(file);
    throw NcclError(ncclInvalidUsage, used);
  }
  return file;
}

void closeCompletedIds() {
  std::vector<OpenFiles::File> closing;
  {
    LockGuard lock(openFiles().mutex);
    std::erase_if(openFiles().files, [&](const OpenFiles::File& file) {
      if (!complete(file.number)) return false;
      closing.push_back(file);
      return true;
    });
  }
  for (const OpenFiles::File& file : closing) {
    withdraw(file.token);
    ::close(file.number);
  }
}

}  // namespace torchcomms_pg::shm
