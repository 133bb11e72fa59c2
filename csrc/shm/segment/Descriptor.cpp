#include "shm/segment/Descriptor.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>

#include "base/Mutex.hpp"
#include "base/Thread.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

// Time limit for an answer of the other process, which may be stopped for a while.
constexpr std::chrono::seconds kPatience{30};
constexpr int kLookMs = 250;
// Time limit for a request to arrive after its sender has connected.
constexpr int kRequestMs = 1000;

struct Shared {
  Mutex mutex;
  std::map<Token, int> files GUARDED_BY(mutex);
  // The socket that the thread tcpg_files serves, or -1.
  int listening GUARDED_BY(mutex) = -1;

  void inChild() REQUIRES(mutex) {
    files.clear();
    if (listening >= 0) ::close(std::exchange(listening, -1));
  }
};

Shared& shared() {
  return forkSafe<Shared>();
}

// Returns the address of a process's socket. The address is abstract (unix(7)), not a file's.
std::pair<sockaddr_un, socklen_t> addressOf(uint32_t pid) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto name = "torchcomms_pg/" + std::to_string(pid) + "/" + std::to_string(pidSpace());
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, offsetof(sockaddr_un, sun_path) + 1 + name.size()};
}

bool readable(int socket, int milliseconds) {
  pollfd wanted{socket, POLLIN, 0};
  return poll(&wanted, 1, milliseconds) > 0;
}

// A message of one byte, with room for a descriptor.
struct OneByte {
  OneByte() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }

  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
};

// Sends one byte with the descriptor, or without one if `file` is -1.
void send(int socket, int file) {
  OneByte sent;
  if (file >= 0) {
    cmsghdr* const header = CMSG_FIRSTHDR(&sent.message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(header), &file, sizeof file);
  } else {
    sent.message.msg_controllen = 0;
  }
  sendmsg(socket, &sent.message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Returns the received descriptor, or none if the message has none.
FileDescriptor receive(int socket) {
  OneByte received;
  if (recvmsg(socket, &received.message, MSG_CMSG_CLOEXEC) <= 0) return FileDescriptor();
  const cmsghdr* const header = CMSG_FIRSTHDR(&received.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return FileDescriptor();
  int file = -1;
  std::memcpy(&file, CMSG_DATA(header), sizeof file);
  return FileDescriptor(file);
}

void serve(int listening) {
  for (;;) {
    const FileDescriptor peer{accept4(listening, nullptr, nullptr, SOCK_CLOEXEC)};
    if (!peer) {
      // If this process has no free descriptor, the connection stays queued, and is accepted later.
      if (errno != EINTR) poll(nullptr, 0, kLookMs);
      continue;
    }
    Token token{};
    if (!host::isOfThisUser(peer.get()) || !readable(peer.get(), kRequestMs) ||
        recv(peer.get(), &token, sizeof token, 0) != sizeof token) {
      continue;
    }
    LockGuard lock(shared().mutex);
    const auto found = shared().files.find(token);
    send(peer.get(), found == shared().files.end() ? -1 : found->second);
  }
}

// Opens this process's socket, and starts the thread that serves it. Throws NcclError.
void listen(Shared& all) REQUIRES(all.mutex) {
  const auto [address, bytes] = addressOf(processId());
  FileDescriptor made{socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  if (!made || bind(made.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0 ||
      ::listen(made.get(), SOMAXCONN) != 0) {
    throw systemFailure("opening a socket for descriptors of shared memory");
  }
  try {
    startDetached("tcpg_files", [listening = made.get()] { serve(listening); });
  } catch (const std::system_error& error) {
    throw NcclError(ncclSystemError, std::string("starting tcpg_files: ") + error.what());
  }
  all.listening = made.release();
}

// Asks process `pid` for the descriptor that `token` names, and returns it. Throws NcclError.
FileDescriptor ask(uint32_t pid, const Token& token) {
  const auto process = "process " + std::to_string(pid);
  const auto [address, bytes] = addressOf(pid);
  const FileDescriptor made{socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  if (!made || connect(made.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) {
    throw systemFailure(process + " hands out no descriptors");
  }
  uint32_t server = 0;
  if (!host::isOfThisUser(made.get(), &server) || server != pid) {
    throw NcclError(ncclInvalidUsage, "the socket of " + process + " is another's");
  }
  if (::send(made.get(), &token, sizeof token, MSG_NOSIGNAL) != sizeof token) {
    throw systemFailure(process + " takes no request");
  }
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!readable(made.get(), kLookMs)) {
    if (!processAlive(pid, 0) || std::chrono::steady_clock::now() >= end) {
      throw NcclError(ncclRemoteError, process + " has not answered");
    }
  }
  auto file = receive(made.get());
  if (!file) throw NcclError(ncclInvalidUsage, process + " no longer has the memory");
  return file;
}

}  // namespace

Token makeToken() {
  Token token;
  if (getrandom(token.data(), sizeof token, 0) != sizeof token) {
    throw systemFailure("getrandom");
  }
  return token;
}

void share(const Token& token, int file) {
  if (prctl(PR_GET_DUMPABLE) == 1) return;
  LockGuard lock(shared().mutex);
  if (shared().listening < 0) listen(shared());
  shared().files[token] = file;
}

void withdraw(const Token& token) {
  LockGuard lock(shared().mutex);
  shared().files.erase(token);
}

std::string descriptorPath(uint32_t pid, int file) {
  return "/proc/" + (pid == processId() ? "self" : std::to_string(pid)) + "/fd/" +
         std::to_string(file);
}

bool forbidden(uint32_t pid, int error) {
  return error == EACCES || error == EPERM ||
         (access(("/proc/" + std::to_string(pid)).c_str(), F_OK) != 0 && processAlive(pid, 0));
}

FileDescriptor openShared(uint32_t pid, int file, const Token& token) {
  const auto path = descriptorPath(pid, file);
  FileDescriptor opened{::open(path.c_str(), O_RDWR | O_CLOEXEC)};
  if (opened) return opened;
  const int error = errno;
  if (!forbidden(pid, error)) throw systemFailure("cannot open " + path, error);
  const auto text = "cannot open " + path + ": " + std::strerror(error);
  try {
    return ask(pid, token);
  } catch (const NcclError& failure) {
    throw NcclError(
        failure.result,
        text + "; " + failure.what() +
            ". Ranks of one user share memory where all have the same capabilities and user "
            "namespace, and where a process that is not dumpable (PR_SET_DUMPABLE, setuid) was so "
            "before its group was made; otherwise communicate through backend 'gloo'");
  }
}

bool sealSize(int file) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  return fcntl(file, F_ADD_SEALS, kSeals) == 0 || (fcntl(file, F_GET_SEALS) & kSeals) == kSeals;
}

std::shared_ptr<std::byte> mapFile(
    int file, size_t bytes, const std::string& what, uint64_t offset) {
  const uint64_t skipped = offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const size_t length = bytes + skipped;
  void* base = mmap(
      nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file,
      static_cast<off_t>(offset - skipped));
  if (base == MAP_FAILED) throw systemFailure(what);
  const std::shared_ptr<std::byte> mapping(
      static_cast<std::byte*>(base), [length](std::byte* pointer) { munmap(pointer, length); });
  return {mapping, mapping.get() + skipped};
}

NcclError systemFailure(const std::string& what, int error) {
  return NcclError(ncclSystemError, what + ": " + std::strerror(error));
}

}  // namespace torchcomms_pg::shm
