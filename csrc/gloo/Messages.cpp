#include "gloo/Messages.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Store keys: the number of requests to connect with `rank`; the rank that made the `number`-th
// request; the notice that `rank` has left.
std::string connectRequestKey(int rank) {
  return "messages/wanted/" + std::to_string(rank);
}
std::string wishOf(int rank, int64_t number) {
  return connectRequestKey(rank) + "/" + std::to_string(number);
}
std::string leftKey(int rank) {
  return "messages/left/" + std::to_string(rank);
}

// Context of `done` for a message through shared memory.
struct Context {
  std::shared_ptr<Messages> messages;
  std::shared_ptr<Transfer> transfer;
};

Packet packetOf(const Message& message, int number) {
  return {
      .signature =
          {.kind = 0,
           .types = static_cast<uint8_t>(message.type),
           .root = 0,
           .countLow = static_cast<uint32_t>(message.count),
           .countHigh = static_cast<uint32_t>(message.count >> 32)},
      .sending = message.sending,
      .peer = number,
      .tag = Link::kMessageTag,
      .data = message.buffer,
      .bytes = message.count * elementSize(message.type),
      .userTag = message.tag,
      .confirmed = message.confirmed};
}

host::NcclError finalized() {
  return {ncclInvalidUsage, "the communicator has been finalized"};
}

bool fits(const Transfer& receive, int source, const Packet& envelope) {
  return receive.tag == envelope.userTag && (receive.peer == kAnyPeer || receive.peer == source);
}

}  // namespace

Messages::Messages(Ways ways) : ways_(std::move(ways)), rank_(ways_.topology->rank) {}

bool Messages::isInside(const Message& message) const {
  return message.peer != kAnyPeer && ways_.topology->hostOf[message.peer] == ways_.topology->host();
}

// Returns whether this rank's rail leads to `peer`.
bool Messages::isCounterpart(int peer) const {
  const auto& t = *ways_.topology;
  return ways_.rail != nullptr && t.localOf[peer] == t.local();
}

Messages::Transfers Messages::post(const std::vector<Message>& messages, bool together) {
  Transfers transfers;
  for (const auto& message : messages) {
    together = together && isInside(message) && message.done == nullptr;
  }
  try {
    for (const auto& message : messages) {
      transfers.push_back(std::make_shared<Transfer>(message, message.peer, together));
      start(transfers.back());
    }
  } catch (const std::exception& error) {
    withdraw(transfers, error);
    throw;
  }
  return transfers;
}

void Messages::start(const std::shared_ptr<Transfer>& transfer) {
  try {
    if (isInside(*transfer)) {
      addInside(transfer);
    } else if (transfer->sending) {
      sendOutside(transfer);
    } else {
      receiveOutside(transfer);
    }
  } catch (const std::system_error& error) {
    ways_.groupFailure->failWithoutThread(ways_.topology->nameOf(rank_), error);
    ways_.groupFailure->check();
  }
}

void Messages::addInside(const std::shared_ptr<Transfer>& transfer) {
  auto inside = std::make_shared<shm::Transfer>(*transfer);
  inside->elsewhere = transfer->peer == kAnyPeer;
  inside->peer = inside->elsewhere ? kAnyPeer : ways_.topology->localOf[transfer->peer];
  try {
    if (transfer->together) {
      ways_.inside->pointToPoint().add(inside);
      transfer->inside = std::move(inside);
      return;
    }
    auto context = std::make_unique<Context>(shared_from_this(), transfer);
    inside->context = context.get();
    inside->done = [](void* raw, ncclResult_t result, int local) noexcept {
      const std::unique_ptr<Context> context(static_cast<Context*>(raw));
      context->messages->endInside(*context->transfer, result, local);
    };
    ways_.inside->pointToPoint().runIndependently(inside);
    static_cast<void>(context.release());  // done() owns it now
    transfer->inside = std::move(inside);
  } catch (const host::NcclError& failure) {
    ways_.groupFailure->raiseFor(failure, ways_.topology->inside());
  }
}

// Handles the end of a transfer in shared memory. `local`: the peer's number on this host, or
// kAnyPeer if unknown. Called in any thread.
void Messages::endInside(Transfer& transfer, ncclResult_t result, int local) {
  if (local != kAnyPeer) {
    transfer.partner = ways_.topology->inside()[local];
  }
  const auto& segment = ways_.inside->segment();
  if (result != ncclSuccess && segment.failed()) {
    // If this raises, memory is short, and the other ranks are not notified.
    attempt([&] { ways_.groupFailure->adopt(segment.failure(), ways_.topology->inside()); });
  }
  if (isInside(transfer) && transfer.done != nullptr) {
    return transfer.done(transfer.context, result, transfer.partner);
  }
  LockGuard lock(mutex_);
  transfer.insideResult = result;
  std::erase_if(posted_, [&](const auto& posted) { return posted.get() == &transfer; });
  changed_.notify_all();
}

// Returns the connection with `peer`; the first call starts to make it.
Messages::Pair& Messages::pairWith(int peer) {
  const auto& t = *ways_.topology;
  const auto [entry, fresh] = pairs_.try_emplace(peer);
  Pair& pair = entry->second;
  if (!fresh || closed_) {
    return pair;
  }
  pair.shared = isCounterpart(peer);
  if (pair.shared) {
    pair.link = ways_.rail;
    pair.number = t.hostOf[peer];
  } else {
    const auto [low, high] = std::minmax(rank_, peer);
    pair.link =
        ways_.newLink("pair/" + std::to_string(low) + "-" + std::to_string(high), {low, high});
    pair.number = peer > rank_ ? 1 : 0;
  }
  try {
    startDetached(
        "tcpg_gloo", [self = shared_from_this(), peer, &pair] { self->receiveLoop(peer, pair); });
  } catch (...) {
    pairs_.erase(entry);
    throw;
  }
  return pair;
}

// Runs in one thread for each peer: connects, sends the messages that waited for the connection,
// then receives envelopes. complete() waits for the data.
void Messages::receiveLoop(int peer, Pair& pair) {
  try {
    connect(peer, pair);
    for (;;) {
      Packet envelope{.signature = {}, .peer = pair.number, .tag = Link::kMessageTag};
      const auto broken = pair.link->receiveEnvelope(envelope);
      if (!broken.empty()) {
        return noteBroken(peer, pair, broken);
      }
      take(peer, pair, envelope);
    }
  } catch (const host::NcclError&) {
    // The group has failed, or the link is closed.
  } catch (const std::exception& error) {
    ways_.groupFailure->fail({ncclInternalError, error.what(), {}});
  }
}

void Messages::connect(int peer, Pair& pair) {
  {
    const ExitGuard unfinished;
    if (pair.shared) {
      pair.link->awaitConnections();
    } else {
      pair.link->connectDetached([&](c10d::Store& group) {
        const auto number = group.add(connectRequestKey(peer), 1);
        group.set(wishOf(peer, number), std::to_string(rank_));
        ways_.groupFailure->announce();
      });
    }
  }
  UniqueLock lock(mutex_);
  for (;;) {
    ways_.groupFailure->check();
    if (closed_) {
      throw finalized();
    }
    if (pair.unsent.empty()) {
      pair.connected = true;
      return;
    }
    const auto transfer = std::move(pair.unsent.front());
    pair.unsent.pop_front();
    give(*transfer, [&] { return pair.link->post(packetOf(*transfer, pair.number)); });
  }
}

// Calls `body`, which gives the transfer's buffer to a link, and sets `packet` to the result.
// Releases mutex_ during `body`. withdraw() waits until `body` has returned. This is soon, since
// the link is connected or closed and Gloo's calls do not block; only if the connection breaks does
// the link look for the cause for some seconds.
template <class Give>
void Messages::give(Transfer& transfer, const Give& body) {
  struct Giving {
    Messages& all;
    Transfer& transfer;
    std::optional<Packet> packet = {};
    ~Giving() {
      transfer.packet = std::move(packet);
      transfer.giving = false;
      all.changed_.notify_all();
    }
  };
  transfer.giving = true;
  Giving giving{*this, transfer};
  const Unlocked unlocked(mutex_);
  giving.packet = body();
}

void Messages::sendOutside(const std::shared_ptr<Transfer>& transfer) {
  UniqueLock lock(mutex_);
  Pair& pair = pairWith(transfer->peer);
  if (!pair.connected) {
    pair.unsent.push_back(transfer);
    return;
  }
  lock.unlock();
  transfer->packet = pair.link->post(packetOf(*transfer, pair.number));
}

void Messages::receiveOutside(const std::shared_ptr<Transfer>& transfer) {
  const bool any = transfer->peer == kAnyPeer;
  if (any) {
    addInside(transfer);
  }
  UniqueLock lock(mutex_);
  if (!any) {
    pairWith(transfer->peer);
  } else if (ways_.rail != nullptr) {
    for (const auto& members : ways_.topology->hosts) {
      const int counterpart = members[ways_.topology->local()];
      if (counterpart != rank_) {
        pairWith(counterpart);
      }
    }
  }
  for (auto& [source, pair] : pairs_) {
    const auto found = std::ranges::find_if(
        pair.held, [&](const Packet& envelope) { return fits(*transfer, source, envelope); });
    if (found == pair.held.end()) {
      continue;
    }
    if (!claim(*transfer)) {
      return;
    }
    const Packet envelope = std::move(*found);
    pair.held.erase(found);
    return accept(*transfer, source, pair, envelope);
  }
  if (transfer->insideResult) {
    return;
  }
  posted_.push_back(transfer);
  if (any) {
    return;
  }
  const auto& pair = pairs_.at(transfer->peer);
  if (const auto broken = pair.broken; !broken.empty()) {
    lock.unlock();
    pair.link->raiseBroken(pair.number, broken);
  }
}

// Returns whether the receive has no message yet. If so, withdraws the receive from shared memory.
bool Messages::claim(Transfer& receive) {
  if (receive.inside == nullptr) {
    return true;
  }
  if (receive.insideResult || !ways_.inside->pointToPoint().cancel(receive.inside)) {
    return false;
  }
  delete static_cast<Context*>(receive.inside->context);
  receive.inside = nullptr;
  return true;
}

void Messages::take(int peer, Pair& pair, const Packet& envelope) {
  std::shared_ptr<Transfer> receive;
  UniqueLock lock(mutex_);
  for (auto next = posted_.begin(); next != posted_.end() && receive == nullptr;) {
    if (!fits(**next, peer, envelope)) {
      ++next;
      continue;
    }
    if (claim(**next)) {
      receive = *next;
    }
    next = posted_.erase(next);
  }
  if (receive == nullptr) {
    pair.held.push_back(envelope);
    return;
  }
  accept(*receive, peer, pair, envelope);
}

// Gives the message of `envelope` to `receive`. Releases mutex_ meanwhile.
void Messages::accept(Transfer& receive, int peer, const Pair& pair, const Packet& envelope) {
  receive.partner = peer;
  give(receive, [&] {
    auto packet = packetOf(receive, pair.number);
    packet.envelope = envelope.envelope;
    pair.link->accept(packet);
    return packet;
  });
}

// Records that a connection has ended. Raises only if a receive waits for the peer: a peer may
// leave when it has nothing more to send.
void Messages::noteBroken(int peer, Pair& pair, const std::string& how) {
  bool awaited = false;
  {
    LockGuard lock(mutex_);
    pair.broken = how;
    awaited =
        std::ranges::any_of(posted_, [&](const auto& receive) { return receive->peer == peer; });
  }
  if (awaited) {
    pair.link->raiseBroken(pair.number, how);
  }
}

void Messages::complete(const Transfers& transfers) {
  std::vector<std::shared_ptr<shm::Transfer>> together;
  for (const auto& transfer : transfers) {
    if (transfer->together) {
      together.push_back(transfer->inside);
    }
  }
  if (!together.empty()) {
    try {
      ways_.inside->pointToPoint().run(together);
    } catch (const host::NcclError& failure) {
      ways_.groupFailure->raiseFor(failure, ways_.topology->inside());
    }
    return;
  }
  try {
    for (const auto& transfer : transfers) {
      completeOutside(*transfer);
    }
  } catch (const std::exception& error) {
    withdraw(transfers, error);
    throw;
  }
}

void Messages::withdraw(const Transfers& transfers, const std::exception& why) {
  bool outside = false, inside = false;
  {
    // Destroyed after the lock is released. This ends Gloo's transfers: Gloo waits until its own
    // thread has left the buffers, and that thread never blocks while it uses a buffer.
    std::vector<Packet> underWay;
    UniqueLock lock(mutex_);
    for (const auto& transfer : transfers) {
      std::erase(posted_, transfer);
      if (const auto pair = pairs_.find(transfer->peer); pair != pairs_.end()) {
        std::erase(pair->second.unsent, transfer);
      }
      changed_.wait(lock, [&] { return !transfer->giving; });
      if (transfer->packet) {
        underWay.push_back(*std::exchange(transfer->packet, std::nullopt));
        outside = true;
      }
      // The buffer of a transfer with `together` is not touched before complete() starts it.
      if (transfer->inside != nullptr && !transfer->together && !transfer->insideResult &&
          !claim(*transfer)) {
        inside = true;
      }
    }
  }
  if ((outside || inside) && dynamic_cast<const host::NcclError*>(&why) == nullptr) {
    ways_.groupFailure->fail({ncclInternalError, why.what(), {}});
  }
  if (inside) {
    const auto failure = ways_.groupFailure->known();
    ways_.inside->pointToPoint().giveUp(
        failure ? host::NcclError(failure->result, failure->what()) : finalized());
  }
}

void Messages::completeOutside(Transfer& transfer) {
  UniqueLock lock(mutex_);
  ways_.groupFailure->wait(changed_, mutex_, lock, [&]() REQUIRES(mutex_) {
    return transfer.insideResult || transfer.packet || closed_;
  });
  ways_.groupFailure->check();
  if (transfer.insideResult == ncclSuccess) {
    return;
  }
  if (!transfer.packet) {
    throw finalized();
  }
  auto& link = *pairs_.at(transfer.partner).link;
  lock.unlock();
  link.complete(*transfer.packet, /*late=*/false);
}

void Messages::lookForOthers(c10d::Store& group) {
  const auto wishes = connectRequestKey(rank_);
  const auto count = group.check({wishes}) ? group.add(wishes, 0) : 0;
  for (; looked_ < count && group.check({wishOf(rank_, looked_ + 1)}); ++looked_) {
    const auto text = group.get(wishOf(rank_, looked_ + 1));
    try {
      LockGuard lock(mutex_);
      pairWith(std::stoi(std::string(text.begin(), text.end())));
    } catch (const std::system_error& error) {
      ways_.groupFailure->failWithoutThread(ways_.topology->nameOf(rank_), error);
    }
  }
  std::vector<int> awaited;
  {
    LockGuard lock(mutex_);
    for (const auto& [peer, pair] : pairs_) {
      if (!pair.connected && !pair.shared) {
        awaited.push_back(peer);
      }
    }
  }
  for (const int peer : awaited) {
    if (group.check({leftKey(peer)})) {
      ways_.groupFailure->fail(
          {ncclRemoteError,
           ways_.topology->nameOf(peer) + " has left before the first message between it and " +
               ways_.topology->nameOf(rank_),
           {peer}});
    }
  }
}

void Messages::wake() {
  LockGuard lock(mutex_);
  changed_.notify_all();
}

void Messages::close() {
  std::vector<std::shared_ptr<Link>> links;
  {
    LockGuard lock(mutex_);
    closed_ = true;
    for (const auto& [peer, pair] : pairs_) {
      if (!pair.shared && pair.link != nullptr) {
        links.push_back(pair.link);
      }
    }
    changed_.notify_all();
  }
  for (const auto& link : links) {
    link->close();
  }
  // The rail notifies counterparts, so they need no key.
  const auto& t = *ways_.topology;
  bool mayBeWanted = false;
  for (int peer = 0; peer < t.size; ++peer) {
    mayBeWanted |= t.hostOf[peer] != t.host() && !isCounterpart(peer);
  }
  if (mayBeWanted && !ways_.groupFailure->known()) {
    ways_.groupFailure->write(leftKey(rank_), "");
  }
}

}  // namespace torchcomms_pg::gloo
