#include "shm/segment/Descriptor.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>

#include "base/FileDescriptor.hpp"
#include "base/Mutex.hpp"
#include "base/Thread.hpp"
#include "shm/Host.hpp"
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

NcclError failedTo(const std::string& what, int error) {
  return NcclError(ncclSystemError, what + ": " + std::strerror(error));
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

// Sends one byte with the descriptor, or without one if `file` is -1.
void send(int socket, int file) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(header), &file, sizeof file);
  }
  sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Returns the received descriptor, or -1 if the message has none.
int receive(int socket) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) <= 0) return -1;
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return -1;
  int file = -1;
  std::memcpy(&file, CMSG_DATA(header), sizeof file);
  return file;
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
    throw failedTo("opening a socket for descriptors of shared memory", errno);
  }
  try {
    startDetached("tcpg_files", [listening = made.get()] { serve(listening); });
  } catch (const std::system_error& error) {
    throw NcclError(ncclSystemError, std::string("starting tcpg_files: ") + error.what());
  }
  all.listening = made.release();
}

// Asks process `pid` for the descriptor that `token` names, and returns it. Throws NcclError.
int ask(uint32_t pid, const Token& token) {
  const auto process = "process " + std::to_string(pid);
  const auto [address, bytes] = addressOf(pid);
  const FileDescriptor made{socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  if (!made || connect(made.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) {
    throw failedTo(process + " hands out no descriptors", errno);
  }
  uint32_t server = 0;
  if (!host::isOfThisUser(made.get(), &server) || server != pid) {
    throw NcclError(ncclInvalidUsage, "the socket of " + process + " is another's");
  }
  if (::send(made.get(), &token, sizeof token, MSG_NOSIGNAL) != sizeof token) {
    throw failedTo(process + " takes no request", errno);
  }
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!readable(made.get(), kLookMs)) {
    if (!processAlive(pid, 0) || std::chrono::steady_clock::now() >= end) {
      throw NcclError(ncclRemoteError, process + " has not answered");
    }
  }
  const int file = receive(made.get());
  if (file < 0) throw NcclError(ncclInvalidUsage, process + " no longer has the memory");
  return file;
}

}  // namespace

Token makeToken() {
  Token token;
  if (getrandom(token.data(), sizeof token, 0) != sizeof token) {
    throw failedTo("getrandom", errno);
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

int openShared(uint32_t pid, int file, const Token& token) {
  const auto path = descriptorPath(pid, file);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened >= 0) return opened;
  const int error = errno;
  if (!forbidden(pid, error)) throw failedTo("cannot open " + path, error);
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

}  // namespace torchcomms_pg::shm
