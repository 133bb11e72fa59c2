#include "gloo/Link.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include <thread>

#include "base/ExitGuard.hpp"
#include "base/Thread.hpp"
#include "host/Names.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Size in bytes of the text that gives the reason of a failure.
constexpr int64_t kReasonBytes = 1024;

// Time after which learn() aborts the wait for a reason.
constexpr std::chrono::milliseconds kArrivalLook{5};

// Limit of the bytes of data that an envelope holds.
constexpr size_t kInline = 464;
struct Envelope {
  Signature signature;
  int32_t dataTag;
  int32_t userTag;
  uint32_t apart;  // 1 if the data follows under `dataTag`, 0 if it is in `data`
  uint64_t bytes;
  char data[kInline];
};
static_assert(sizeof(Envelope) == 496 && std::is_trivially_copyable_v<Envelope>);

Envelope& envelopeOf(const Packet& packet) {
  return *static_cast<Envelope*>(packet.envelope.data_ptr());
}

// Returns the data that follows an envelope. If the packet has no data, returns one byte, for a
// sender that waits until its message has been received.
at::Tensor dataOf(const Packet& packet) {
  return packet.bytes == 0
             ? at::zeros({1}, at::kByte)
             : at::from_blob(packet.data, {static_cast<int64_t>(packet.bytes)}, at::kByte);
}

std::string told(const Signature& signature) {
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
  link->setup_.groupFailure->watch(
      link, {.release = [raw] { raw->release(); },
             .tell =
                 [raw] {
                   raw->tellReason(host::encode(*raw->setup_.groupFailure->known(), kReasonBytes));
                 },
             .told = [raw] { raw->disconnect(); },
             .learn = [raw](bool) { raw->learn(); }});
  return link;
}

Packet Link::post(Packet packet) {
  if (const auto broken = hand(packet); !broken.empty()) {
    raiseBroken(packet.peer, broken);
  }
  return packet;
}

// Hands the packet to Gloo. Returns the error of the connection, or "" on success.
std::string Link::hand(Packet& packet) {
  const auto connections = awaitConnections();
  const bool apart =
      packet.bytes > kInline || packet.confirmed || (!packet.announced && packet.bytes > 0);
  try {
    LockGuard lock(mutex_);  // Gloo's counters are not thread-safe
    if (packet.announced) {
      // Zeroed, since the whole envelope is sent: its unused part must not reveal other memory.
      packet.envelope = at::zeros({sizeof(Envelope)}, at::kByte);
      std::vector<at::Tensor> tensors{packet.envelope};
      if (packet.sending) {
        seal(packet);
        packet.head = connections->send(tensors, packet.peer, packet.tag);
      } else {
        packet.head = connections->recv(tensors, packet.peer, packet.tag);
      }
    }
    if (apart && (packet.sending || packet.dataTag != 0)) {
      std::vector<at::Tensor> data{dataOf(packet)};
      packet.body = packet.sending ? connections->send(data, packet.peer, packet.dataTag)
                                   : connections->recv(data, packet.peer, packet.dataTag);
    }
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Fills the envelope of a packet that is sent.
void Link::seal(Packet& packet) {
  if (packet.dataTag == 0) {
    data_ = (data_ + 1) % kTagLimit;
    packet.dataTag = kDataTags + data_;
  }
  auto& envelope = envelopeOf(packet);
  envelope.signature = packet.signature;
  envelope.dataTag = packet.dataTag;
  envelope.userTag = packet.userTag;
  envelope.apart = packet.bytes > kInline || packet.confirmed;
  envelope.bytes = packet.bytes;
  if (packet.bytes > 0) {
    std::memcpy(envelope.data, packet.data, std::min(packet.bytes, kInline));
  }
}

void Link::complete(Packet& packet, bool late) {
  struct Late {
    Link& link;
    std::list<int>::iterator entry;
    Late(Link& link, int peer) : link(link) {
      LockGuard lock(link.mutex_);
      entry = link.late_.insert(link.late_.end(), peer);
    }
    ~Late() {
      LockGuard lock(link.mutex_);
      link.late_.erase(entry);
    }
  };
  std::optional<Late> counted;
  if (late) {
    counted.emplace(*this, packet.peer);
  }
  if (packet.head != nullptr) {
    await(packet.head, packet.peer);
    if (!packet.sending) {
      accept(packet);
    }
  }
  if (packet.body != nullptr) {
    await(packet.body, packet.peer);
  }
}

void Link::accept(Packet& packet) {
  const auto& envelope = envelopeOf(packet);
  compare(packet, envelope.signature);
  if (!envelope.apart) {
    if (envelope.bytes > 0) {
      std::memcpy(packet.data, envelope.data, envelope.bytes);
    }
    return;
  }
  if (packet.body != nullptr) {
    return;
  }
  const auto connections = awaitConnections();
  try {
    std::vector<at::Tensor> data{dataOf(packet)};
    LockGuard lock(mutex_);
    packet.body = connections->recv(data, packet.peer, envelope.dataTag);
  } catch (const std::exception& error) {
    raiseBroken(packet.peer, error.what());
  }
}

std::string Link::receiveEnvelope(Packet& packet) {
  auto broken = hand(packet);
  if (broken.empty()) {
    broken = wait(std::exchange(packet.head, nullptr));
  }
  if (broken.empty()) {
    packet.userTag = envelopeOf(packet).userTag;
  } else if (failAsHeard(packet.peer)) {
    setup_.groupFailure->check();
  }
  return broken;
}

void Link::compare(const Packet& packet, const Signature& theirs) {
  if (theirs == packet.signature) {
    return;
  }
  const auto text = "the ranks disagree: " + setup_.names[setup_.rank] + " called " +
                    (packet.signature.kind == 0 ? "recv for " : "") + told(packet.signature) +
                    ", " + setup_.names[packet.peer] + " " +
                    (theirs.kind == 0 ? "sent " : "called ") + told(theirs);
  setup_.groupFailure->fail(
      host::NcclError(
          ncclInvalidUsage, text, {setup_.members[setup_.rank], setup_.members[packet.peer]}));
  throw host::NcclError(ncclInvalidUsage, text);
}

// Waits for `work`. Returns its error, or "" on success. Raises the group's failure, or an error if
// the link is closed.
std::string Link::wait(c10::intrusive_ptr<c10d::Work> work) {
  c10d::Work* const waited = work.get();
  std::list<c10::intrusive_ptr<c10d::Work>>::iterator entry;
  {
    LockGuard lock(mutex_);  // if the group fails after check(), release() finds the entry
    setup_.groupFailure->check();
    checkOpen();
    entry = awaited_.insert(awaited_.end(), std::move(work));
  }
  const auto goesOn = [this] {
    setup_.groupFailure->lookForSignals();
    LockGuard lock(mutex_);
    return !closed_ && !setup_.groupFailure->known();
  };
  std::string broken = "aborted";
  try {
    bool ended = false;
    do {
      ended = watch_->wait(*waited);
    } while (!ended && goesOn());
    if (ended) {
      broken.clear();
    }
  } catch (const std::exception& error) {
    broken = error.what();
  }
  LockGuard lock(mutex_);
  awaited_.erase(entry);
  changed_.notify_all();
  setup_.groupFailure->check();
  if (!broken.empty()) {
    checkOpen();
  }
  return broken;
}

// Raises if the link is closed.
void Link::checkOpen() const {
  if (closed_) throw host::NcclError(ncclInvalidUsage, "the communicator has been finalized");
}

void Link::await(const c10::intrusive_ptr<c10d::Work>& work, int peer) {
  if (const auto broken = wait(work); !broken.empty()) {
    raiseBroken(peer, broken);
  }
}

void Link::raiseBroken(int peer, const std::string& what) {
  auto& groupFailure = *setup_.groupFailure;
  groupFailure.check();
  const auto& name = setup_.names[peer];
  const std::vector<int> members{setup_.members[peer]};
  const auto broken = "broken (" + what.substr(0, what.find(". ")) + ")";
  if (!failAsHeard(peer) && !hasLeft(peer)) {
    if (const auto lost = groupFailure.awaitReason(members, /*ask=*/true); lost && !hasLeft(peer)) {
      if (!lost->silent.empty()) {
        groupFailure.fail(
            {ncclRemoteError,
             name + " died or left: its connection is " + broken + ", and it does not answer",
             members});
      }
      groupFailure.fail(
          {ncclRemoteError,
           "the connection between " + setup_.names[setup_.rank] + " and " + name + " is " +
               broken +
               (lost->store ? ", and both ranks are there: something between them has ended it"
                            : ", and the store is gone: nobody knows whether a rank has died"),
           {}});
    }
  }
  if (hasLeft(peer)) {
    groupFailure.fail({ncclRemoteError, name + " has left the group", members});
  }
  throw *groupFailure.known();
}

// Posts a receive for each peer's reason, which a peer sends before it drops its connections. A
// rank that finds a connection broken then has the reason even if the store is gone.
void Link::expectReasons() {
  for (int peer = 0; connections_ != nullptr && peer < size(); ++peer) {
    if (peer != setup_.rank) {
      std::vector<at::Tensor> texts{at::zeros({kReasonBytes}, at::kByte)};
      try {
        reasons_[peer] = {texts.front(), connections_->recv(texts, peer, kReasonTag)};
      } catch (const std::exception&) {
        // The peer has closed the group; the next operation with this peer fails.
      }
    }
  }
}

// Sends `reason` to all peers; an empty reason means that this rank leaves.
void Link::tellReason(const std::string& reason) {
  std::vector<at::Tensor> texts{at::zeros({kReasonBytes}, at::kByte)};
  std::memcpy(texts.front().data_ptr(), reason.data(), reason.size());
  Connections connections;
  {
    LockGuard lock(mutex_);
    connections = connections_;
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> sent;
  for (int peer = 0; connections != nullptr && peer < size(); ++peer) {
    if (peer != setup_.rank) {
      attempt([&] {  // if this raises, the connection is gone
        LockGuard lock(mutex_);
        sent.push_back(connections->send(texts, peer, kReasonTag));
      });
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + kReasonPatience;
  for (const auto& work : sent) {
    // If this raises, the connection is gone, or the peer does not receive the reason.
    attempt([&] {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    });
  }
}

// Fails the group with the reason that `peer` has sent before its connection broke. Returns false
// if the peer has sent no reason, or a notice that it leaves.
bool Link::failAsHeard(int peer) {
  Reason reason;
  {
    LockGuard lock(mutex_);
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
  return take(peer, reason);
}

// Fails the group with a received reason. If the reason is that the peer leaves, records that and
// returns false.
bool Link::take(int peer, const Reason& reason) {
  const auto* const text = static_cast<const char*>(reason.text.data_ptr());
  if (setup_.groupFailure->failAsTold(std::string(text, strnlen(text, kReasonBytes)))) {
    return true;
  }
  LockGuard lock(mutex_);
  left_.insert(peer);
  return false;
}

bool Link::hasLeft(int peer) const {
  LockGuard lock(mutex_);
  return left_.contains(peer);
}

// Fails the group with a reason that any peer has sent by now. Gloo reports an arrival only to a
// waiting thread, so this thread waits for each reason in turn, and another thread aborts each wait
// that lasts. An abort that no wait has met makes the next wait for that reason return at once,
// even if the reason has arrived: aborting all receives would hide every reason but the first.
void Link::learn() {
  std::map<int, Reason> reasons;
  {
    LockGuard lock(mutex_);
    reasons = reasons_;
  }
  if (reasons.empty()) {
    return;
  }
  constexpr int kNone = -1;
  constexpr int kDone = -2;
  struct Waiting {
    Mutex mutex;
    // The peer whose reason this thread waits for, kNone or kDone.
    int peer GUARDED_BY(mutex) = kNone;
  };
  const auto waiting = std::make_shared<Waiting>();
  const auto waitFor = [&waiting](int peer) {
    const LockGuard lock(waiting->mutex);
    waiting->peer = peer;
  };
  try {
    Monitor::get().runDetached([unfinished = ExitGuard(), reasons, waiting] {
      for (int seen = kNone;;) {
        std::this_thread::sleep_for(kArrivalLook);
        const LockGuard lock(waiting->mutex);
        if (waiting->peer == kDone) {
          return;
        }
        // Aborts a wait that the previous look has seen, too.
        if (waiting->peer != kNone && waiting->peer == seen) {
          attempt([&] { reasons.at(seen).arrival->abort(); });  // else in the next look
        }
        seen = waiting->peer;
      }
    });
  } catch (const std::exception&) {
    return;  // no thread can be started
  }
  for (const auto& [peer, reason] : reasons) {
    try {
      waitFor(peer);
      if (reason.arrival->wait(kNever)) {
        LockGuard lock(mutex_);
        reasons_.erase(peer);
      } else {
        continue;
      }
    } catch (const std::exception&) {
      continue;  // the connection is gone
    }
    if (take(peer, reason)) {
      break;
    }
  }
  waitFor(kDone);
}

void Link::release() {
  // Aborts under the lock and keeps no reference to a work: with a reference, Gloo would still move
  // data after the waiting thread has dropped the work.
  LockGuard lock(mutex_);
  changed_.notify_all();
  for (const auto& work : awaited_) {
    work->abort();  // makes its wait() return
  }
}

std::vector<int> Link::missingRanks() const {
  LockGuard lock(mutex_);
  return late_.empty() ? std::vector<int>{} : std::vector<int>{setup_.members[late_.front()]};
}

}  // namespace torchcomms_pg::gloo
