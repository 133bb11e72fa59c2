#include "gloo/Link.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/OutstandingTask.hpp"
#include "base/Thread.hpp"
#include "host/Names.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Number of ranks that an error names as not connected with this one.
constexpr size_t kNamed = 4;

// Keys of a rank that wants the ranks to be connected, and of one that ends without having been so.
constexpr const char* kConnectKey = "connect";
constexpr const char* kLeftKey = "left";

// Size of the reason of a failure.
constexpr int64_t kReasonBytes = 1024;

constexpr size_t kInline = 464;
struct Envelope {
  host::Signature signature;
  int32_t dataTag;
  int32_t userTag;
  uint32_t apart;  // the data follows under its own tag
  uint64_t bytes;
  char data[kInline];
};
static_assert(sizeof(Envelope) == 496 && std::is_trivially_copyable_v<Envelope>);

Envelope& envelopeOf(const PendingMessage& pending) {
  return *static_cast<Envelope*>(pending.envelope.data_ptr());
}

// Returns the data that follows an envelope; one byte for a message without data whose sender waits
// until it is received.
at::Tensor dataOf(const PendingMessage& pending) {
  return pending.bytes == 0
             ? at::zeros({1}, at::kByte)
             : at::from_blob(pending.data, {static_cast<int64_t>(pending.bytes)}, at::kByte);
}

std::string told(const host::Signature& signature) {
  if (signature.kind != 0) {
    return host::describe(signature);
  }
  const auto count = uint64_t{signature.countHigh} << 32 | signature.countLow;
  return "a message of " + std::to_string(count) + " x " +
         host::typeName(static_cast<ncclDataType_t>(signature.types));
}

}  // namespace

std::shared_ptr<Link> Link::make(Setup setup) {
  std::shared_ptr<Link> link(new Link(std::move(setup)));
  auto* const raw = link.get();
  link->setup_.fault->watch(
      link,
      {.release = [raw] { raw->release(); },
       .tell = [raw] { raw->tellReason(); },
       .told = [raw] { raw->disconnect(); }});
  return link;
}

bool Link::connected() const {
  std::lock_guard lock(mutex_);
  return connections_ != nullptr;
}

Connections Link::connections() {
  if (!connected()) {
    startConnecting(/*tells=*/true);
  }
  std::unique_lock lock(mutex_);
  setup_.fault->wait(changed_, lock, [&] { return connections_ || closed_; });
  setup_.fault->check();
  if (!connections_) checkOpen();
  return connections_;
}

// Connects in a thread of its own, since Gloo waits for up to five times its timeout, and looks for
// nothing.
void Link::connect(std::chrono::milliseconds timeout, const std::function<void()>& look) {
  startConnecting(/*tells=*/false);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto ended = [&] { return setup_.fault->known() || connections_ || closed_; };
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kSignalLook, ended)) {
    lock.unlock();
    try {
      look ? look() : setup_.fault->lookForSignals();
    } catch (const host::Failure& failure) {
      setup_.fault->fail(failure);
      throw;
    } catch (const std::exception&) {
      setup_.fault->failInterrupted();
      throw;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      std::ostringstream why;
      why << "not within " << std::chrono::duration<double>(timeout).count()
          << " s. Do firewalls let the hosts reach each other's TCP ports?";
      setup_.fault->fail(unconnected(why.str(), {}));
    }
    lock.lock();
  }
  lock.unlock();
  setup_.fault->check();
}

// Returns the error. `why`: Gloo's reason, or this link's.
host::Failure Link::unconnected(const std::string& why, std::vector<int> ranks) const {
  std::string others;
  for (size_t peer = 0, named = 0; peer < setup_.names.size() && named <= kNamed; ++peer) {
    if (static_cast<int>(peer) != setup_.rank) {
      others += named == 0 ? "" : ", ";
      others += named++ == kNamed ? "others" : setup_.names[peer];
    }
  }
  return {
      ncclRemoteError,
      setup_.names[setup_.rank] + " could not be connected with " + others + " over Gloo: " + why +
          " Set GLOO_SOCKET_IFNAME on each host to the interface (`ip addr` lists them) at which "
          "the other hosts reach it",
      std::move(ranks)};
}

void Link::connectThrough(const c10::intrusive_ptr<c10d::Store>& group) {
  auto made = setup_.connect(
      c10::make_intrusive<c10d::PrefixStore>(setup_.prefix, group), setup_.rank, size());
  {
    std::lock_guard lock(mutex_);
    if (!setup_.fault->known() && !closed_) {
      connections_ = std::move(made);
      expectReasons();
    }
  }
  if (made != nullptr) {
    setup_.fault
        ->awaitTold();  // the others read the reason before they see that these connections end
  }
  changed_.notify_all();
}

void Link::connectApart(const std::function<void(c10d::Store& group)>& tell) {
  c10::intrusive_ptr<c10d::Store> group;
  std::string why;
  try {
    group = setup_.store->clone();  // another thread may wait in the shared one
    tell(*group);
    return connectThrough(group);
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  if (!group || !setup_.fault->failAsTold(*group)) {
    setup_.fault->fail(unconnected(why + ".", {setup_.members[setup_.rank]}));
  }
}

// Connects in a thread of its own: the other ranks may take long or never come, and a failure
// releases the threads that wait here.
void Link::startConnecting(bool tells) {
  {
    std::lock_guard lock(mutex_);
    if (connecting_ || connections_ || closed_ || setup_.fault->known()) {
      return;
    }
    connecting_ = true;
  }
  try {
    startDetached("tcpg_gloo", [unfinished = OutstandingTask(), self = shared_from_this(), tells] {
      self->connectApart([&](c10d::Store& group) {
        if (tells) {
          group.set(self->key(kConnectKey), std::vector<uint8_t>{});
          Fault::announce(group);
        }
      });
    });
  } catch (const std::system_error& error) {
    setup_.fault->fail(
        host::Failure(
            ncclSystemError,
            setup_.names[setup_.rank] + " cannot be connected: no thread can be started (" +
                error.what() + ")",
            {setup_.members[setup_.rank]}));
  }
}

std::shared_ptr<PendingMessage> Link::post(PendingMessage posted) {
  auto pending = std::make_shared<PendingMessage>(std::move(posted));
  if (const auto broken = hand(*pending); !broken.empty()) {
    raiseBroken(pending->peer, broken);
  }
  return pending;
}

// Hands the message to Gloo. Returns the error of the connection, or "".
std::string Link::hand(PendingMessage& pending) {
  const auto connections = this->connections();
  const bool apart =
      pending.bytes > kInline || pending.confirmed || (!pending.announced && pending.bytes > 0);
  try {
    std::lock_guard lock(mutex_);  // Gloo's counters are not made for several threads
    if (pending.announced) {
      pending.envelope = at::empty({sizeof(Envelope)}, at::kByte);
      std::vector<at::Tensor> tensors{pending.envelope};
      if (pending.sending) {
        seal(pending);
        pending.head = connections->send(tensors, pending.peer, pending.tag);
      } else {
        pending.head = connections->recv(tensors, pending.peer, pending.tag);
      }
    }
    if (apart && (pending.sending || pending.dataTag != 0)) {
      std::vector<at::Tensor> data{dataOf(pending)};
      pending.body = pending.sending ? connections->send(data, pending.peer, pending.dataTag)
                                     : connections->recv(data, pending.peer, pending.dataTag);
    }
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Called with mutex_ held.
void Link::seal(PendingMessage& pending) {
  if (pending.dataTag == 0) {
    data_ = (data_ + 1) % kTagLimit;
    pending.dataTag = kDataTags + data_;
  }
  auto& envelope = envelopeOf(pending);
  envelope.signature = pending.signature;
  envelope.dataTag = pending.dataTag;
  envelope.userTag = pending.userTag;
  envelope.apart = pending.bytes > kInline || pending.confirmed;
  envelope.bytes = pending.bytes;
  if (pending.bytes > 0) {
    std::memcpy(envelope.data, pending.data, std::min(pending.bytes, kInline));
  }
}

void Link::complete(PendingMessage& pending, bool late) {
  std::optional<std::list<int>::iterator> entry;
  if (late) {
    std::lock_guard lock(mutex_);
    entry = late_.insert(late_.end(), pending.peer);
  }
  const auto leave = [&] {
    if (entry) {
      std::lock_guard lock(mutex_);
      late_.erase(*entry);
    }
  };
  try {
    if (pending.head != nullptr) {
      await(pending.head, pending.peer);
      if (!pending.sending) {
        open(pending);
      }
    }
    if (pending.body != nullptr) {
      await(pending.body, pending.peer);
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

// Takes what the envelope of a message holds; data that follows it is received from now on.
void Link::open(PendingMessage& pending) {
  const auto& envelope = envelopeOf(pending);
  compare(pending, envelope.signature);
  if (!envelope.apart) {
    if (envelope.bytes > 0) {
      std::memcpy(pending.data, envelope.data, envelope.bytes);
    }
    return;
  }
  if (pending.body != nullptr) {
    return;
  }
  const auto connections = this->connections();
  try {
    std::vector<at::Tensor> data{dataOf(pending)};
    std::lock_guard lock(mutex_);
    pending.body = connections->recv(data, pending.peer, envelope.dataTag);
  } catch (const std::exception& error) {
    raiseBroken(pending.peer, error.what());
  }
}

std::string Link::receiveEnvelope(PendingMessage& pending) {
  auto broken = hand(pending);
  if (broken.empty()) {
    broken = wait(std::exchange(pending.head, nullptr));
  }
  if (broken.empty()) {
    pending.userTag = envelopeOf(pending).userTag;
  } else if (failAsHeard(pending.peer)) {
    setup_.fault->check();
  }
  return broken;
}

void Link::accept(PendingMessage& pending, const PendingMessage& receive) {
  pending.signature = receive.signature;
  pending.data = receive.data;
  pending.bytes = receive.bytes;
  open(pending);
}

void Link::compare(const PendingMessage& pending, const host::Signature& theirs) {
  if (theirs == pending.signature) {
    return;
  }
  const auto text = "the ranks disagree: " + setup_.names[setup_.rank] + " called " +
                    (pending.signature.kind == 0 ? "recv for " : "") + told(pending.signature) +
                    ", " + setup_.names[pending.peer] + " " +
                    (theirs.kind == 0 ? "sent " : "called ") + told(theirs);
  setup_.fault->fail(
      host::Failure(
          ncclInvalidUsage, text, {setup_.members[setup_.rank], setup_.members[pending.peer]}));
  throw host::Failure(ncclInvalidUsage, text);
}

// Waits for `work`. Returns its error, or "". Raises the group's failure, or that the link is
// closed.
std::string Link::wait(c10::intrusive_ptr<c10d::Work> work) {
  c10d::Work* const waited = work.get();
  std::list<c10::intrusive_ptr<c10d::Work>>::iterator entry;
  {
    std::lock_guard lock(mutex_);  // release() sees what comes before the failure
    setup_.fault->check();
    checkOpen();
    entry = awaited_.insert(awaited_.end(), std::move(work));
  }
  const auto goesOn = [this] {
    setup_.fault->lookForSignals();
    std::lock_guard lock(mutex_);
    return !closed_ && !setup_.fault->known();
  };
  std::string broken = "aborted";
  try {
    bool ended = watch_->wait(*waited);
    while (!ended && goesOn()) {
      ended = watch_->wait(*waited);
    }
    if (ended) {
      broken.clear();
    }
  } catch (const std::exception& error) {
    broken = error.what();
  }
  std::lock_guard lock(mutex_);
  awaited_.erase(entry);
  changed_.notify_all();
  setup_.fault->check();
  if (!broken.empty()) {
    checkOpen();
  }
  return broken;
}

// Called with mutex_ held.
void Link::checkOpen() const {
  if (closed_) throw host::Failure(ncclInvalidUsage, "the communicator has been finalized");
}

void Link::await(const c10::intrusive_ptr<c10d::Work>& work, int peer) {
  if (const auto broken = wait(work); !broken.empty()) {
    raiseBroken(peer, broken);
  }
}

void Link::raiseBroken(int peer, const std::string& what) {
  setup_.fault->check();
  if (!failAsHeard(peer) && !setup_.fault->failAsTold(kWrittenPatience)) {
    setup_.fault->fail(
        host::Failure(
            ncclRemoteError,
            setup_.names[peer] + " died or left: its connection is broken (" +
                what.substr(0, what.find(". ")) + ")",
            {setup_.members[peer]}));
  }
  throw *setup_.fault->known();
}

// Posts receives for the reason of a rank that fails the group and then drops its connections: a
// rank that finds them broken has it even if the store has gone with the rank that served it.
// Called with mutex_ held.
void Link::expectReasons() {
  for (int peer = 0; connections_ != nullptr && peer < size(); ++peer) {
    if (peer != setup_.rank) {
      std::vector<at::Tensor> texts{at::zeros({kReasonBytes}, at::kByte)};
      reasons_[peer] = {texts.front(), connections_->recv(texts, peer, kReasonTag)};
    }
  }
}

void Link::tellReason() {
  auto text = encode(*setup_.fault->known());
  text.resize(kReasonBytes);
  std::vector<at::Tensor> texts{at::empty({kReasonBytes}, at::kByte)};
  std::memcpy(texts.front().data_ptr(), text.data(), text.size());
  Connections connections;
  {
    std::lock_guard lock(mutex_);
    connections = connections_;
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> sent;
  for (int peer = 0; connections != nullptr && peer < size(); ++peer) {
    try {
      std::lock_guard lock(mutex_);
      if (peer != setup_.rank) {
        sent.push_back(connections->send(texts, peer, kReasonTag));
      }
    } catch (const std::exception&) {
      // The connection is gone.
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + kReasonPatience;
  for (const auto& work : sent) {
    try {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
      // The connection is gone, or the peer does not take the reason.
    }
  }
}

// Fails with the reason that `peer`, whose connection is broken, has told.
bool Link::failAsHeard(int peer) {
  Reason reason;
  {
    std::lock_guard lock(mutex_);
    const auto found = reasons_.find(peer);
    if (found == reasons_.end()) {
      return false;
    }
    reason = std::move(found->second);
    reasons_.erase(found);
  }
  try {
    reason.arrival->wait(kReasonPatience);
  } catch (const std::exception&) {
    return false;
  }
  const auto* const text = static_cast<const char*>(reason.text.data_ptr());
  const auto told = decode(std::string(text, strnlen(text, kReasonBytes)));
  if (told) {
    setup_.fault->fail(*told);
  }
  return told.has_value();
}

void Link::release() {
  std::vector<c10::intrusive_ptr<c10d::Work>> blocked;
  {
    std::lock_guard lock(mutex_);
    blocked.assign(awaited_.begin(), awaited_.end());
  }
  changed_.notify_all();
  for (const auto& work : blocked) {
    work->abort();  // makes its wait() return
  }
}

std::vector<int> Link::absentRanks() const {
  std::lock_guard lock(mutex_);
  return late_.empty() ? std::vector<int>{} : std::vector<int>{setup_.members[late_.front()]};
}

void Link::close() {
  bool unconnected = false;
  setup_.fault->awaitTold();
  {
    std::lock_guard lock(mutex_);
    unconnected = !connections_ && !closed_ && size() > 1 && !setup_.fault->known();
    closed_ = true;
  }
  if (unconnected) {
    tellLeft();
  }
  release();  // threads that wait for an envelope that no longer comes
  {
    // Aborted work must have gone before the connections go.
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kReleasePatience, [this] { return awaited_.empty(); });
  }
  disconnect();
}

void Link::tellLeft() {
  try {
    Monitor::get().runApart([unfinished = OutstandingTask(),
                             store = setup_.store,
                             name = key(kLeftKey),
                             rank = setup_.members[setup_.rank]] {
      try {
        store->set(name, std::to_string(rank));
        Fault::announce(*store);
      } catch (const std::exception&) {
        // The store has gone, and so have the ranks that would have read it.
      }
    });
  } catch (const std::runtime_error&) {
    // No thread can be started: ranks that still wait do so until the deadline.
  }
}

void Link::disconnect() {
  Connections last;  // freed after the lock is released: that joins threads
  std::lock_guard lock(mutex_);
  reasons_.clear();
  last = std::exchange(connections_, nullptr);
}

}  // namespace torchcomms_pg::gloo
