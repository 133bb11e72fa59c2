#include "diagnosis/store/JobStore.hpp"

#include <c10/util/Exception.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>

#include "base/FileDescriptor.hpp"
#include "base/PerProcess.hpp"
#include "base/StorePlace.hpp"
#include "diagnosis/store/StoreBoard.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg {

namespace {

// Limits of the time to connect: to the server's host, and of TCPStore, which then asks the server.
// The latter is long: a rank that has no core, or is stopped meanwhile, must not take the server
// for ended.
constexpr int kConnectingMs = 2000;
constexpr std::chrono::seconds kStoreGreets{30};

// A store in memory has no address that distinguishes it, but a place in memory.
using Name = std::pair<std::string, const c10d::Store*>;

struct JobStores {
  Mutex mutex;
  std::map<Name, std::weak_ptr<JobStore>> all GUARDED_BY(mutex);
};

struct FreeAddresses {
  void operator()(addrinfo* first) const { freeaddrinfo(first); }
};

// Returns 0 if a process listens at the address, otherwise the error's number.
int tryToConnect(const addrinfo& address) {
  const FileDescriptor made(
      ::socket(
          address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
          address.ai_protocol));
  if (!made) {
    return errno;
  }
  if (::connect(made.get(), address.ai_addr, address.ai_addrlen) == 0) {
    return 0;
  }
  if (errno != EINPROGRESS) {
    return errno;
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
  return error;
}

// Raises c10::DistStoreError unless a process listens at the address. TCPStore would print several
// lines if none does.
void findServer(const std::string& host, uint16_t port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  std::string why;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
      error != 0) {
    why = ::gai_strerror(error);
  }
  const std::unique_ptr<addrinfo, FreeAddresses> addresses(found);
  for (const auto* each = found; each != nullptr; each = each->ai_next) {
    const int error = tryToConnect(*each);
    if (error == 0) {
      return;
    }
    why = std::strerror(error);
  }
  C10_THROW_ERROR(
      DistStoreError,
      "no process serves the store at " + host + ":" + std::to_string(port) + " (" + why + ")");
}

// Returns the descriptor of the store's connection, or -1. Only the text that describes a TCPStore
// has it. Without it TCPStore prints a trace when the server has ended.
int descriptorOf(const c10d::TCPStore& store) {
  const auto text = store.repr();
  const auto place = text.find("fd=");
  int number = -1;
  return place != std::string::npos && std::sscanf(text.c_str() + place, "fd=%d", &number) == 1
             ? number
             : -1;
}

PerProcess<JobStores> jobStores;

// Returns the connection of this name: `made`, unless there is one.
std::shared_ptr<JobStore> known(const Name& name, std::shared_ptr<JobStore> made) {
  auto& stores = jobStores.get();
  LockGuard lock(stores.mutex);
  std::erase_if(stores.all, [](const auto& each) {
    const auto store = each.second.lock();
    return !store || store->hasEnded();
  });
  auto& slot = stores.all[name];
  if (auto found = slot.lock()) {
    return found;
  }
  slot = made;
  return made;
}

}  // namespace

std::shared_ptr<JobStore> JobStore::of(const c10::intrusive_ptr<c10d::Store>& prefixed) {
  const auto store = StorePlace(prefixed).store;
  if (const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(store.get())) {
    return at(tcp->getHost(), tcp->getPort());
  }
  if (const auto* const file = dynamic_cast<c10d::FileStore*>(store.get())) {
    return known({file->getPath(), nullptr}, std::make_shared<JobStore>(file->getPath(), store));
  }
  // The ranks of such a store, for example a HashStore, are threads of this process.
  return known(
      {"", store.get()},
      std::make_shared<JobStore>("memory of process " + std::to_string(host::processId()), store));
}

std::shared_ptr<JobStore> JobStore::at(const std::string& host, uint16_t port) {
  auto made = std::make_shared<JobStore>(host, port);
  return known({made->address(), nullptr}, made);
}

std::shared_ptr<status::Hosts> JobStore::hosts() {
  LockGuard lock(mutex_);
  auto found = hosts_.lock();
  if (!found) {
    const auto board = std::make_shared<StoreBoard>(shared_from_this());
    found = std::make_shared<status::Hosts>(address_, board);
    hosts_ = found;
  }
  return found;
}

std::vector<std::shared_ptr<status::Hosts>> JobStore::allHosts() {
  std::vector<std::shared_ptr<status::Hosts>> held;
  auto& stores = jobStores.get();
  LockGuard lock(stores.mutex);
  for (const auto& [name, each] : stores.all) {
    if (const auto store = each.lock()) {
      LockGuard ofStore(store->mutex_);
      if (auto hosts = store->hosts_.lock()) {
        held.push_back(std::move(hosts));
      }
    }
  }
  return held;
}

// Returns whether the server has closed the connection. No server of a store sends anything
// unasked.
bool JobStore::hasEnded() const {
  const int descriptor = descriptor_;
  char byte = 0;
  if (descriptor < 0) {
    return false;
  }
  const auto got = ::recv(descriptor, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

c10d::Store& JobStore::connected() {
  TORCH_CHECK_WITH(
      DistStoreError, !hasEnded(), "no process serves the store at ", address_, " any more");
  if (!connection_ && shared_) {
    connection_ = shared_->clone();
  } else if (!connection_) {
    findServer(host_, port_);
    c10d::TCPStoreOptions options;
    options.port = port_;
    options.waitWorkers = false;
    options.timeout = kStoreGreets;
    const auto made = c10::make_intrusive<c10d::TCPStore>(host_, options);
    connection_ = made;
    descriptor_ = descriptorOf(*made);
  }
  return *connection_;
}

}  // namespace torchcomms_pg
