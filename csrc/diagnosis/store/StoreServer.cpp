#include "diagnosis/store/StoreServer.hpp"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "base/PerProcess.hpp"
#include "diagnosis/store/StorePlace.hpp"

namespace torchcomms_pg {

namespace {

constexpr int kConnectingMs = 2000;

struct Servers {
  Mutex mutex;
  std::map<std::pair<std::string, uint16_t>, std::weak_ptr<StoreServer>> all GUARDED_BY(mutex);
};

struct FreeAddresses {
  void operator()(addrinfo* first) const { freeaddrinfo(first); }
};

// Returns a connection, or one that is not open and the error's number.
std::pair<FileDescriptor, int> connectTo(const addrinfo& address) {
  FileDescriptor made(
      ::socket(
          address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
          address.ai_protocol));
  if (!made) {
    return {FileDescriptor(), errno};
  }
  if (::connect(made.get(), address.ai_addr, address.ai_addrlen) == 0) {
    return {std::move(made), 0};
  }
  if (errno != EINPROGRESS) {
    return {FileDescriptor(), errno};
  }
  pollfd ready{made.get(), POLLOUT, 0};
  int polled = 0;
  do {
    polled = ::poll(&ready, 1, kConnectingMs);
  } while (polled < 0 && errno == EINTR);
  int error = ETIMEDOUT;
  socklen_t length = sizeof error;
  if (polled > 0) {
    ::getsockopt(made.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error != 0) {
    return {FileDescriptor(), error};
  }
  return {std::move(made), 0};
}

// Returns whether the peer has not closed the connection. No server of a store sends anything
// unasked.
bool isOpen(const FileDescriptor& connection) {
  char byte = 0;
  const auto got = ::recv(connection.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

}  // namespace

std::shared_ptr<StoreServer> StoreServer::of(const c10::intrusive_ptr<c10d::Store>& store) {
  const StorePlace place(store);
  const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(place.store.get());
  return tcp == nullptr ? nullptr : at(tcp->getHost(), tcp->getPort());
}

std::shared_ptr<StoreServer> StoreServer::at(const std::string& host, uint16_t port) {
  static PerProcess<Servers> ofProcess;
  auto& servers = ofProcess.get();
  LockGuard lock(servers.mutex);
  std::erase_if(servers.all, [](const auto& each) { return each.second.expired(); });
  auto& slot = servers.all[{host, port}];
  auto known = slot.lock();
  if (!known) {
    known = std::make_shared<StoreServer>(host, port);
    slot = known;
  }
  return known;
}

void StoreServer::check() {
  LockGuard lock(mutex_);
  if (connection_ && isOpen(connection_)) {
    return;
  }
  connection_ = FileDescriptor();
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  std::string why;
  if (const int error =
          ::getaddrinfo(host_.c_str(), std::to_string(port_).c_str(), &wanted, &found);
      error != 0) {
    why = ::gai_strerror(error);
  }
  const std::unique_ptr<addrinfo, FreeAddresses> addresses(found);
  for (const auto* each = found; each != nullptr && !connection_; each = each->ai_next) {
    auto [made, error] = connectTo(*each);
    connection_ = std::move(made);
    why = std::strerror(error);
  }
  TORCH_CHECK_WITH(
      DistStoreError, static_cast<bool>(connection_), "no process serves the store at ", address(),
      " (", why, ")");
}

}  // namespace torchcomms_pg
