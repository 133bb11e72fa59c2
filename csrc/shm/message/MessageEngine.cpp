#include "shm/message/MessageEngine.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {
namespace {

// Limit of the bytes of a message to this rank itself that one step moves.
constexpr size_t kSelfPiece = 1 << 20;

std::string amount(size_t count, ncclDataType_t type) {
  return std::to_string(count) + " " + typeName(type);
}

}  // namespace

MessageEngine::MessageEngine(Segment& segment, int rank)
    : segment_(segment),
      rank_(rank),
      noMemory_(
          std::make_shared<const NcclError>(
              ncclSystemError, segment.nameOf(rank) + ": no memory to handle messages")) {
  const int ranks = segment.size();
  matcher_.prepare(ranks);
  outgoing_.resize(ranks);
  arriving_.resize(ranks);
  for (int peer = 0; peer < ranks; ++peer) {
    outgoing_[peer].channel.attach(segment.channel(rank, peer), segment.channelBytes());
    arriving_[peer].channel.attach(segment.channel(peer, rank), segment.channelBytes());
  }
}

template <class Body>
void MessageEngine::whileMemoryLasts(const Body& body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    if (!problem_) problem_ = noMemory_;
  }
}

void MessageEngine::add(const std::shared_ptr<Transfer>& transfer) {
  transfer->order = added_++;
  transfer->partner.store(transfer->peer, std::memory_order_relaxed);
  whileMemoryLasts([&] {
    if (!transfer->sending) {
      if (const auto message = matcher_.post(transfer)) match(message, transfer);
    } else if (transfer->peer == rank_) {
      sendToSelf(transfer);
    } else {
      sendTo(transfer->peer, transfer);
    }
  });
}

void MessageEngine::sendToSelf(const std::shared_ptr<Transfer>& transfer) {
  auto message = std::make_shared<Incoming>();
  message->source = rank_;
  message->tag = transfer->tag;
  message->count = transfer->count;
  message->type = transfer->type;
  message->bytes = transfer->bytes();
  message->sender = transfer;
  if (const auto receive = matcher_.take(rank_, transfer->tag)) {
    match(message, receive);
  } else {
    matcher_.hold(message);
  }
}

void MessageEngine::sendTo(int destination, const std::shared_ptr<Transfer>& transfer) {
  Outgoing& out = outgoing_[destination];
  out.queue.push_back(transfer);
  if (!out.active) {
    out.active = true;
    sendingTo_.push_back(destination);
  }
}

void MessageEngine::start(const std::shared_ptr<Transfer>& transfer) {
  transfer->started = true;
  if (transfer->sending) return;
  if (transfer->message) {
    whileMemoryLasts([&] { takeMessage(transfer); });
  } else if (!transfer->matched) {
    matcher_.noteStarted(*transfer);
  }
}

bool MessageEngine::step() {
  moved_ = false;
  whileMemoryLasts([this] { moveAll(); });
  return moved_;
}

void MessageEngine::moveAll() {
  for (size_t i = 0; i < sendingTo_.size();) {
    Outgoing& out = outgoing_[sendingTo_[i]];
    pumpOut(sendingTo_[i]);
    if (out.unreceivedCount != 0) endReceived(out);
    out.active = out.current || !out.queue.empty() || out.unreceivedCount != 0;
    if (out.active) {
      ++i;
    } else {
      sendingTo_[i] = sendingTo_.back();
      sendingTo_.pop_back();
    }
  }
  for (int source = 0; source < segment_.size(); ++source) {
    if (arriving_[source].current || matcher_.awaited(source)) pumpIn(source);
  }
  if (!toSelf_.empty()) pumpSelf();
}

void MessageEngine::clear() {
  matcher_.clear();
  for (Outgoing& out : outgoing_) {
    out.queue.clear();
    out.current.reset();
    out.unreceived.clear();
    out.unreceivedCount = 0;
    out.active = false;
  }
  for (Arriving& arriving : arriving_) arriving.current.reset();
  sendingTo_.clear();
  toSelf_.clear();
}

void MessageEngine::report(ncclResult_t result, const std::string& text) {
  if (problem_) return;
  problem_ = std::make_shared<const NcclError>(result, segment_.nameOf(rank_) + text);
}

const Transfer* MessageEngine::oldestPending() const {
  const Transfer* oldest = matcher_.oldestStarted();
  const auto look = [&](const std::shared_ptr<Transfer>& transfer) {
    if (!transfer || !transfer->started) return;
    if (oldest == nullptr || transfer->order < oldest->order) oldest = transfer.get();
  };
  for (const int destination : sendingTo_) {
    const Outgoing& out = outgoing_[destination];
    look(out.current);
    for (const auto& transfer : out.queue) look(transfer);
    for (const auto& transfer : out.unreceived) look(transfer);
  }
  for (const Arriving& arriving : arriving_) {
    if (arriving.current) look(arriving.current->target);
  }
  return oldest;
}

// Chooses the first started send that has no earlier send of its tag before it.
bool MessageEngine::chooseNext(Outgoing& out) {
  for (auto next = out.queue.begin(); next != out.queue.end(); ++next) {
    if (!(*next)->started) continue;
    const int tag = (*next)->tag;
    if (std::any_of(out.queue.begin(), next, [tag](const auto& t) { return t->tag == tag; })) {
      continue;
    }
    out.current = std::move(*next);
    out.queue.erase(next);
    out.slot = 0;
    if (out.current->confirmed) {
      out.unreceived.resize(kSlots + 1);
      // If the slot still belongs to an unreceived message, sends without confirmation: this send
      // then ends once it is written.
      const auto slot = static_cast<uint16_t>(out.messages % kSlots + 1);
      if (!out.unreceived[slot]) out.slot = slot;
    }
    return true;
  }
  return false;
}

void MessageEngine::pumpOut(int destination) {
  Outgoing& out = outgoing_[destination];
  while (out.current || chooseNext(out)) {
    Transfer& transfer = *out.current;
    const MessageHeader header{
        transfer.count, out.messages, transfer.tag, static_cast<uint16_t>(transfer.type), out.slot};
    const auto published = [&] {
      moved_ = true;
      segment_.wakeRank(rank_, destination);
    };
    if (!out.channel.write(
            header,
            static_cast<const std::byte*>(transfer.buffer),
            transfer.bytes(),
            transfer.moved,
            published)) {
      return;
    }
    ++out.messages;
    if (out.slot == 0) {
      end(out.current);
      out.current.reset();
    } else {
      transfer.written = true;
      out.unreceived[out.slot] = std::move(out.current);
      ++out.unreceivedCount;
    }
  }
}

void MessageEngine::endReceived(Outgoing& out) {
  out.channel.forReceived([&](uint16_t slot) {
    end(out.unreceived[slot]);
    out.unreceived[slot].reset();
    --out.unreceivedCount;
    moved_ = true;
  });
}

void MessageEngine::pumpIn(int source) {
  Arriving& arriving = arriving_[source];
  while (!problem_) {
    if (!arriving.current && !openMessage(source, arriving)) return;
    if (problem_ || !moveIn(source, arriving)) return;
  }
}

bool MessageEngine::openMessage(int source, Arriving& arriving) {
  MessageHeader header;
  if (!matcher_.awaited(source) || !arriving.channel.peek(header)) return false;
  if (header.sequence != arriving.messages++) {
    report(ncclInternalError, ": corrupt message channel from rank " + std::to_string(source));
    return false;
  }
  arriving.channel.begin();
  moved_ = true;
  auto message = std::make_shared<Incoming>();
  message->source = source;
  message->tag = header.tag;
  message->count = header.count;
  message->type = static_cast<ncclDataType_t>(header.type);
  message->slot = header.slot;
  message->bytes = message->count * elementSize(message->type);
  arriving.current = message;
  if (const auto receive = matcher_.take(source, header.tag)) {
    match(message, receive);
  } else {
    matcher_.hold(message);
  }
  return true;
}

bool MessageEngine::moveIn(int source, Arriving& arriving) {
  const std::shared_ptr<Incoming> message = arriving.current;
  std::byte* out = message->kept.get();
  if (out == nullptr && message->target && message->target->started) {
    out = static_cast<std::byte*>(message->target->buffer);
  } else if (out == nullptr) {
    if (!matcher_.awaited(source)) return false;
    message->kept.reset(new std::byte[message->bytes]);
    out = message->kept.get();
  }
  const size_t before = message->moved;
  const bool complete = arriving.channel.read(
      out, message->bytes, message->moved, [&] { segment_.wakeRank(rank_, source); });
  moved_ = moved_ || complete || message->moved != before;
  if (!complete) return false;
  message->arrived = true;
  arriving.current.reset();
  if (const auto receive = std::move(message->target)) {
    if (message->kept) {
      receive->message = message;
      if (receive->started) takeMessage(receive);
    } else {
      endReceive(receive, *message);
    }
  }
  return true;
}

void MessageEngine::pumpSelf() {
  std::erase_if(toSelf_, [this](const std::shared_ptr<Incoming>& message) {
    if (!message->sender->started || !message->target->started) return false;
    const size_t size = std::min(kSelfPiece, message->bytes - message->moved);
    host::copy(
        static_cast<std::byte*>(message->target->buffer) + message->moved,
        static_cast<const std::byte*>(message->sender->buffer) + message->moved,
        size);
    message->moved += size;
    moved_ = true;
    if (message->moved != message->bytes) return false;
    end(message->sender);
    end(message->target);
    return true;
  });
}

void MessageEngine::match(
    const std::shared_ptr<Incoming>& message, const std::shared_ptr<Transfer>& receive) {
  if (message->count != receive->count || message->type != receive->type) {
    report(
        ncclInvalidUsage,
        " receives " + amount(receive->count, receive->type) + " from " +
            segment_.nameOf(message->source) + ", which sends " +
            amount(message->count, message->type) + " (tag " + std::to_string(message->tag) + ")");
    return;
  }
  receive->matched = true;
  receive->partner.store(message->source, std::memory_order_relaxed);
  if (message->arrived) {
    receive->message = message;
  } else {
    message->target = receive;
  }
  if (message->sender) {
    message->sender->matched = true;
    toSelf_.push_back(message);
  }
}

void MessageEngine::takeMessage(const std::shared_ptr<Transfer>& receive) {
  const std::shared_ptr<Incoming> message = std::move(receive->message);
  host::copy(receive->buffer, message->kept.get(), message->bytes);
  endReceive(receive, *message);
}

void MessageEngine::endReceive(const std::shared_ptr<Transfer>& receive, const Incoming& message) {
  end(receive);
  if (message.slot == 0) return;
  arriving_[message.source].channel.setReceived(message.slot);
  segment_.wakeRank(rank_, message.source);
}

void MessageEngine::end(const std::shared_ptr<Transfer>& transfer) {
  ended_.push_back(transfer);
  transfer->ended.store(true, std::memory_order_release);
}

}  // namespace torchcomms_pg::shm
