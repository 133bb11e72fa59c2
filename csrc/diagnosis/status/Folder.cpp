#include "diagnosis/status/Folder.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <stdexcept>

#include "host/Process.hpp"

namespace torchcomms_pg::status {

namespace {

constexpr const char* kSocket = ".socket";
constexpr const char* kRanks = ".ranks";

// Limit of connections that wait to be accepted.
constexpr int kBacklog = 16;

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

// Returns the socket address of a path, cut to the 107 bytes that the kernel allows.
sockaddr_un addressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path - 1));
  return address;
}

}  // namespace

Folder::Folder(std::string path) : path_(std::move(path)) {
  if (mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST) {
    fail("cannot make the folder " + path_, errno);
  }
  opened_ = FileDescriptor(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found{};
  if (!opened_ || fstat(opened_.get(), &found) != 0) {
    fail("cannot open the folder " + path_, errno);
  }
  if (found.st_uid != geteuid()) {
    throw std::runtime_error("the folder " + path_ + " is another user's");
  }
  if ((found.st_mode & 077) != 0) {
    throw std::runtime_error("the folder " + path_ + " is open to other users; chmod 700 it");
  }
}

// Returns a file's path through the open folder's descriptor: path_ may be too long for a socket's
// address, or may lead to another folder by now.
std::string Folder::inside(const std::string& name) const {
  return "/proc/self/fd/" + std::to_string(opened_.get()) + "/" + name;
}

Entry Folder::own() {
  return {host::processId(), host::pidSpace()};
}

std::vector<Entry> Folder::entries() const {
  std::vector<Entry> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(inside(".").c_str()), closedir);
  if (!folder) {
    fail("cannot read the folder " + path_, errno);
  }
  while (const auto* const each = readdir(folder.get())) {
    Entry entry;
    char end = '\0';
    if (std::sscanf(each->d_name, "%u-%u%c", &entry.pid, &entry.pidSpace, &end) == 3 &&
        each->d_name == entry.name() + kSocket) {
      found.push_back(entry);
    }
  }
  return found;
}

std::vector<Membership> Folder::memberships(const Entry& entry) const {
  std::ifstream in(inside(entry.name() + kRanks));
  std::vector<Membership> all;
  for (Membership each; in >> each.group >> each.rank;) {
    all.push_back(each);
  }
  return all;
}

FileDescriptor Folder::connect(const Entry& entry) const {
  FileDescriptor made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) {
    fail("no socket can be made", errno);
  }
  const auto address = addressOf(inside(entry.name() + kSocket));
  // A full backlog (EAGAIN) means that a process listens, but does not accept.
  const auto* const name = reinterpret_cast<const sockaddr*>(&address);
  if (::connect(made.get(), name, sizeof address) != 0 && errno != EAGAIN) {
    return FileDescriptor();
  }
  return made;
}

FileDescriptor Folder::listen() const {
  const auto entry = own();
  const auto path = inside(entry.name() + kSocket);
  // Gives the socket its name only when it listens: a socket under such a name that refuses
  // connections belongs to a dead process.
  const auto fresh = inside(entry.name() + ".new");
  const auto address = addressOf(fresh);
  // Removes files left by an earlier process with this pid, or by this process's previous server.
  unlink(fresh.c_str());
  unlink(inside(entry.name() + kRanks).c_str());
  FileDescriptor made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made || bind(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(made.get(), kBacklog) != 0 || rename(fresh.c_str(), path.c_str()) != 0) {
    fail("cannot listen in the folder " + path_, errno);
  }
  return made;
}

void Folder::add(const Membership& membership) const {
  const FileDescriptor file(open(
      inside(own().name() + kRanks).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC,
      0600));
  const auto line = std::to_string(membership.group) + " " + std::to_string(membership.rank) + "\n";
  if (!file || write(file.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    fail("cannot write in the folder " + path_, errno);
  }
}

void Folder::remove() const noexcept {
  discard(own());
}

void Folder::discard(const Entry& entry) const noexcept {
  for (const auto* const end : {kSocket, kRanks}) {
    unlinkat(opened_.get(), (entry.name() + end).c_str(), 0);
  }
}

void Folder::sweep() const {
  std::vector<Entry> dead;
  std::set<uint64_t> living;
  for (const auto& entry : entries()) {
    // A process of another pid namespace cannot be looked up, and counts as living.
    if (entry.pidSpace == host::pidSpace() && !host::processAlive(entry.pid, 0)) {
      dead.push_back(entry);
    } else {
      for (const auto& each : memberships(entry)) {
        living.insert(each.group);
      }
    }
  }
  for (const auto& entry : dead) {
    const auto groups = memberships(entry);
    if (std::ranges::none_of(
            groups, [&](const auto& each) { return living.contains(each.group); })) {
      discard(entry);
    }
  }
}

}  // namespace torchcomms_pg::status
