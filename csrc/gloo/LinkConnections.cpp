// A link's connections, from the first request for them to their end.
#include <ATen/ATen.h>

#include <system_error>

#include "base/ExitGuard.hpp"
#include "base/SharedPatience.hpp"
#include "base/StoreValue.hpp"
#include "base/TextStreams.hpp"
#include "base/Thread.hpp"
#include "gloo/Link.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Limit of the ranks that an error lists as not connected with this rank.
constexpr size_t kNamed = 4;

// Time limit for waiting threads to leave a link that is closed, shared by all links.
SharedPatience releasePatience{std::chrono::seconds(5)};

// Store keys. kConnectKey: a rank wants the ranks to be connected. kLeftKey: a rank has left before
// the ranks were connected, so ranks that want to be connected fail.
constexpr const char* kConnectKey = "connect";
constexpr const char* kLeftKey = "left";

// The store through which the ranks of a link exchange their addresses. Gloo keeps it, and needs it
// only to connect. Reads each key only once, in one round trip: Gloo asks for each key three times,
// and also for keys that it has set. Thread-safe.
class MeetingPlace : public c10d::PrefixStore {
 public:
  MeetingPlace(std::string prefix, c10::intrusive_ptr<c10d::Store> store, int ranks)
      : PrefixStore(std::move(prefix), std::move(store)), ranks_(ranks) {}

  // Speaks to the store over `other`'s connection from now on, and so ends its own.
  void use(c10::intrusive_ptr<c10d::Store> other) { store_ = std::move(other); }

  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    PrefixStore::set(key, value);
    keep(key, value);
  }

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    LockGuard lock(mutex_);
    return values_.at(key);
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (const auto& key : keys) {
      for (StorePauses pauses(ranks_); !known(key); pauses.next()) {
        if (const auto value = valueOf(*store_, joinKey(key))) {
          keep(key, {value->begin(), value->end()});
          break;
        }
        if (std::chrono::steady_clock::now() >= deadline) {
          C10_THROW_ERROR(
              DistStoreError, "no rank has written '" + key + "' within " +
                                  std::to_string(timeout.count()) + " ms");
        }
      }
    }
  }

  bool hasExtendedApi() const override { return false; }  // Gloo then reads keys by get()

 private:
  bool known(const std::string& key) {
    LockGuard lock(mutex_);
    return values_.contains(key);
  }
  void keep(const std::string& key, std::vector<uint8_t> value) {
    LockGuard lock(mutex_);
    values_[key] = std::move(value);
  }

  const int ranks_;
  Mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_ GUARDED_BY(mutex_);
};

// Tag of the message that ends connecting.
constexpr int kConnectedTag = 0;

// Waits until all ranks have connected. Gloo's own call returns when this rank has connected: if
// this rank then closed its group at once, a peer that is still connecting would fail.
void awaitAllConnected(c10d::Backend& made) {
  std::vector<at::Tensor> sent{at::zeros({1}, at::kByte)};
  std::vector<at::Tensor> received;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int peer = 0; peer < made.getSize(); ++peer) {
    if (peer != made.getRank()) {
      received.push_back(at::empty({1}, at::kByte));
      std::vector<at::Tensor> from{received.back()};
      works.push_back(made.recv(from, peer, kConnectedTag));
      works.push_back(made.send(sent, peer, kConnectedTag));
    }
  }
  for (const auto& work : works) {
    work->wait();
  }
}

}  // namespace

bool Link::connected() const {
  LockGuard lock(mutex_);
  return connections_ != nullptr;
}

Connections Link::awaitConnections() {
  if (!connected()) {
    startConnecting(/*tells=*/true);
  }
  UniqueLock lock(mutex_);
  setup_.groupFailure->wait(
      changed_, mutex_, lock, [&]() REQUIRES(mutex_) { return connections_ || closed_; });
  setup_.groupFailure->check();
  if (!connections_) checkOpen();
  return connections_;
}

// Connects in a separate thread, since Gloo blocks for up to five times its timeout and checks for
// neither signals nor failures meanwhile.
void Link::connect(std::chrono::milliseconds timeout, const std::function<void()>& look) {
  startConnecting(/*tells=*/false);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto ended = [&]() REQUIRES(mutex_) {
    return setup_.groupFailure->known() || connections_ || closed_;
  };
  UniqueLock lock(mutex_);
  while (!changed_.wait_for(lock, kSignalLook, ended)) {
    lock.unlock();
    // Another rank may have connected before this rank, and then failed the group.
    if (setup_.groupFailure->failAsOthers(*setup_.store)) {
      lock.lock();
      continue;
    }
    try {
      look ? look() : setup_.groupFailure->lookForSignals();
    } catch (const host::NcclError& failure) {
      setup_.groupFailure->fail(failure);
      throw;
    } catch (const std::exception&) {
      setup_.groupFailure->failInterrupted();
      throw;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      TextWriter why;
      why << "not within " << std::chrono::duration<double>(timeout).count()
          << " s. Do firewalls let the hosts reach each other's TCP ports?";
      setup_.groupFailure->fail(unconnected(why.str(), {}));
    }
    lock.lock();
  }
  lock.unlock();
  setup_.groupFailure->check();
}

// Returns an error's beginning, e.g. "rank 0 on host0 could not be connected with rank 2 on host1".
std::string Link::nameOfRanks() const {
  std::string others;
  for (size_t peer = 0, named = 0; peer < setup_.names.size() && named <= kNamed; ++peer) {
    if (static_cast<int>(peer) != setup_.rank) {
      others += named == 0 ? "" : ", ";
      others += named++ == kNamed ? "others" : setup_.names[peer];
    }
  }
  return setup_.names[setup_.rank] + " could not be connected with " + others;
}

// Returns the error that the ranks could not be connected. `why`: the reason. `ranks`: the ranks
// certainly at fault. If one rank cannot reach another, neither is certainly at fault.
host::NcclError Link::unconnected(const std::string& why, std::vector<int> ranks) const {
  return {
      ncclRemoteError,
      nameOfRanks() + " over Gloo: " + why +
          " Set GLOO_SOCKET_IFNAME on each host to the interface (`ip addr` lists them) at which "
          "the other hosts reach it",
      std::move(ranks)};
}

void Link::connectThrough(c10::intrusive_ptr<c10d::Store> group) {
  const auto place = c10::make_intrusive<MeetingPlace>(setup_.prefix, std::move(group), size());
  auto made = setup_.connect(place, setup_.rank, size());
  if (made != nullptr) {  // NOLINT(bugprone-use-after-move): null after the move
    awaitAllConnected(*made);
  }
  place->use(setup_.store);
  {
    LockGuard lock(mutex_);
    if (!setup_.groupFailure->known() && !closed_) {
      connections_ = std::move(made);
      expectReasons();
    }
  }
  if (made != nullptr) {
    // The other ranks have to be able to read the reason before these connections end.
    setup_.groupFailure->awaitTold();
  }
  changed_.notify_all();
}

void Link::connectDetached(const std::function<void(c10d::Store& group)>& tell) {
  auto& groupFailure = *setup_.groupFailure;
  std::string why;
  try {
    // Uses a separate connection, since another thread may block in the shared one.
    auto group = setup_.store->clone();
    tell(*group);
    return connectThrough(std::move(group));
  } catch (const NoAddress& error) {
    groupFailure.fail(unconnected(std::string(error.what()) + ".", {setup_.members[setup_.rank]}));
    return;
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  if (const auto lost = groupFailure.awaitReason(setup_.members, /*ask=*/false)) {
    groupFailure.fail(
        lost->store ? unconnected(why + ".", {})
                    : host::NcclError(
                          ncclRemoteError,
                          nameOfRanks() + ", since the group's store is gone (" +
                              why.substr(0, why.find(". ")) +
                              "): the process that serves it, which is rank 0's or the launcher's, "
                              "has ended, or the network to it is down"));
  }
}

// Connects in a separate thread: the other ranks may take long or never connect, and a failure has
// to release the threads that wait.
void Link::startConnecting(bool tells) {
  {
    LockGuard lock(mutex_);
    if (connecting_ || connections_ || closed_ || setup_.groupFailure->known()) {
      return;
    }
    connecting_ = true;
  }
  try {
    startDetached("tcpg_gloo", [unfinished = ExitGuard(), self = shared_from_this(), tells] {
      self->connectDetached([&](c10d::Store& group) {
        if (tells) {
          group.set(self->key(kConnectKey), std::vector<uint8_t>{});
          self->setup_.groupFailure->announce();
        }
      });
    });
  } catch (const std::system_error& error) {
    setup_.groupFailure->failWithoutThread(setup_.names[setup_.rank], error);
  }
}

void Link::lookForOthers(c10d::Store& group) {
  if (connected() || !group.check({key(kConnectKey)})) {
    return;
  }
  setup_.groupFailure->failAsWritten(group, key(kLeftKey));
  startConnecting(/*tells=*/true);
}

void Link::close() {
  bool leaves = false;
  bool unconnected = false;
  setup_.groupFailure->awaitTold();
  {
    LockGuard lock(mutex_);
    leaves = !closed_ && size() > 1 && !setup_.groupFailure->known();
    unconnected = !connections_;
    closed_ = true;
  }
  if (leaves && unconnected) {
    const int rank = setup_.members[setup_.rank];
    setup_.groupFailure->write(
        key(kLeftKey),
        host::encode(
            {ncclRemoteError,
             "rank " + std::to_string(rank) +
                 " has left before the ranks were connected for tensors of the CPU, which the "
                 "first operation on such has them do",
             {rank}}));
  } else if (leaves) {
    tellReason("");
  }
  release();  // wakes threads that wait for an envelope
  {
    // Aborted work has to be destroyed before the connections.
    UniqueLock lock(mutex_);
    releasePatience.spend([&](std::chrono::milliseconds patience) {
      return changed_.wait_for(
          lock, patience, [this]() REQUIRES(mutex_) { return awaited_.empty(); });
    });
  }
  disconnect();
}

void Link::disconnect() {
  Connections last;  // destroyed after the lock is released, since its destructor joins threads
  LockGuard lock(mutex_);
  reasons_.clear();
  last = std::exchange(connections_, nullptr);
}

}  // namespace torchcomms_pg::gloo
