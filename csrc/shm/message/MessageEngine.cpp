#include "shm/message/MessageEngine.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {
namespace {

// Limit of the bytes that one step moves of a message to this rank itself.
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
              ncclSystemError, segment.nameOf(rank) + ": no memory to handle messages")),
      matcher_(segment.size()),
      outgoing_(segment.size()),
      arriving_(segment.size()) {
  for (int peer = 0; peer < segment.size(); ++peer) {
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
    } else if (transfer->peer != rank_) {
      Outgoing& out = outgoing_[transfer->peer];
      out.queue.push_back(transfer);
      if (!std::exchange(out.active, true)) sendingTo_.push_back(transfer->peer);
    } else if (const auto receive = matcher_.take(rank_, transfer->tag)) {
      match(transfer, receive);
    } else {
      matcher_.hold(transfer);
    }
  });
}

void MessageEngine::start(const std::shared_ptr<Transfer>& transfer) {
  transfer->started = true;
  if (transfer->sending) return;
  if (transfer->passed) {
    whileMemoryLasts([&] { endReceive(transfer); });
  } else if (!transfer->matched) {
    matcher_.noteStarted(*transfer);
  }
}

bool MessageEngine::step() {
  moved_ = false;
  if (!problem_) whileMemoryLasts([this] { moveAll(); });
  return moved_;
}

void MessageEngine::moveAll() {
  for (size_t i = 0; i < sendingTo_.size();) {
    Outgoing& out = outgoing_[sendingTo_[i]];
    pumpOut(sendingTo_[i]);
    if (out.unreceivedCount != 0) {
      out.channel.forReceived([&](uint16_t slot) {
        end(out.unreceived[slot]);
        out.unreceived[slot].reset();
        --out.unreceivedCount;
        moved_ = true;
      });
    }
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

void MessageEngine::report(ncclResult_t result, const std::string& text) {
  if (problem_) return;
  problem_ = std::make_shared<const NcclError>(result, segment_.nameOf(rank_) + text);
}

const Transfer* MessageEngine::oldestPending() const {
  const Transfer* oldest = nullptr;
  const auto look = [&](const std::shared_ptr<Transfer>& transfer) {
    if (!transfer || !transfer->started) return;
    if (oldest == nullptr || transfer->order < oldest->order) oldest = transfer.get();
  };
  matcher_.forPosted(look);
  for (const int destination : sendingTo_) {
    const Outgoing& out = outgoing_[destination];
    look(out.current);
    for (const auto& transfer : out.queue) look(transfer);
    for (const auto& transfer : out.unreceived) look(transfer);
  }
  for (const Arriving& arriving : arriving_) look(arriving.current);
  return oldest;
}

// Chooses the first started send in the queue that has no other send of its tag before it. Returns
// false if the queue has no such send.
bool MessageEngine::chooseNext(Outgoing& out) {
  for (auto next = out.queue.begin(); next != out.queue.end(); ++next) {
    if (!(*next)->started) continue;
    const int tag = (*next)->tag;
    if (std::any_of(out.queue.begin(), next, [tag](const auto& t) { return t->tag == tag; })) {
      continue;
    }
    out.current = std::move(*next);
    out.queue.erase(next);
    if (out.current->confirmed) {
      out.unreceived.resize(kSlots + 1);
      // If the slot still belongs to an unreceived message, sends without confirmation: this send
      // then ends once it is written.
      const auto slot = static_cast<uint16_t>(out.messages % kSlots + 1);
      if (!out.unreceived[slot]) out.current->slot = slot;
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
        transfer.count, out.messages, transfer.tag, static_cast<uint16_t>(transfer.type),
        transfer.slot};
    const auto published = [&] {
      moved_ = true;
      segment_.wakeRank(rank_, destination);
    };
    if (!out.channel.write(
            header, static_cast<const std::byte*>(transfer.buffer), transfer.bytes(),
            transfer.moved, published)) {
      return;
    }
    ++out.messages;
    transfer.passed = true;
    if (transfer.slot == 0) {
      end(out.current);
      out.current.reset();
    } else {
      out.unreceived[transfer.slot] = std::move(out.current);
      ++out.unreceivedCount;
    }
  }
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
  const Message message{
      .count = header.count,
      .type = static_cast<ncclDataType_t>(header.type),
      .peer = source,
      .tag = header.tag};
  auto receive = matcher_.take(source, header.tag);
  if (!receive) {
    receive = std::make_shared<Transfer>(message);
    matcher_.hold(receive);
  } else if (!noteMatch(message, *receive)) {
    return false;
  }
  receive->slot = header.slot;
  arriving.current = std::move(receive);
  return true;
}

bool MessageEngine::moveIn(int source, Arriving& arriving) {
  Transfer& receive = *arriving.current;
  std::byte* out = receive.kept.get();
  if (out == nullptr && receive.started) {
    out = static_cast<std::byte*>(receive.buffer);
  } else if (out == nullptr) {
    if (!matcher_.awaited(source)) return false;
    receive.kept.reset(new std::byte[receive.bytes()]);
    out = receive.kept.get();
  }
  const size_t before = receive.moved;
  receive.passed = arriving.channel.read(
      out, receive.bytes(), receive.moved, [&] { segment_.wakeRank(rank_, source); });
  moved_ = moved_ || receive.passed || receive.moved != before;
  if (!receive.passed) return false;
  const auto held = std::move(arriving.current);
  if (receive.started) endReceive(held);
  return true;
}

void MessageEngine::pumpSelf() {
  std::erase_if(toSelf_, [this](const auto& sides) {
    const auto& [send, receive] = sides;
    if (!send->started || !receive->started) return false;
    const size_t size = std::min(kSelfPiece, send->bytes() - send->moved);
    host::copy(
        static_cast<std::byte*>(receive->buffer) + send->moved,
        static_cast<const std::byte*>(send->buffer) + send->moved, size);
    send->moved += size;
    moved_ = true;
    if (send->moved != send->bytes()) return false;
    end(send);
    end(receive);
    return true;
  });
}

// Matches a receive with a message that the Matcher held, or with a send to this rank itself.
void MessageEngine::match(
    const std::shared_ptr<Transfer>& message, const std::shared_ptr<Transfer>& receive) {
  if (!noteMatch(*message, *receive)) return;
  if (message->sending) {
    message->matched = true;
    toSelf_.emplace_back(message, receive);
    return;
  }
  receive->passed = message->passed;
  receive->slot = message->slot;
  receive->moved = message->moved;
  receive->kept = std::move(message->kept);
  auto& current = arriving_[message->peer].current;
  if (current == message) current = receive;
}

// Notes that a receive has its message. If count or type of the two differ, reports the error and
// returns false.
bool MessageEngine::noteMatch(const Message& message, Transfer& receive) {
  if (message.count != receive.count || message.type != receive.type) {
    report(
        ncclInvalidUsage, " receives " + amount(receive.count, receive.type) + " from " +
                              segment_.nameOf(message.peer) + ", which sends " +
                              amount(message.count, message.type) + " (tag " +
                              std::to_string(message.tag) + ")");
    return false;
  }
  receive.matched = true;
  receive.partner.store(message.peer, std::memory_order_relaxed);
  return true;
}

void MessageEngine::endReceive(const std::shared_ptr<Transfer>& receive) {
  if (const auto kept = std::move(receive->kept)) {
    host::copy(receive->buffer, kept.get(), receive->bytes());
  }
  end(receive);
  if (receive->slot == 0) return;
  const int source = receive->partner.load(std::memory_order_relaxed);
  arriving_[source].channel.setReceived(receive->slot);
  segment_.wakeRank(rank_, source);
}

void MessageEngine::end(const std::shared_ptr<Transfer>& transfer) {
  ended_.push_back(transfer);
  transfer->ended.store(true, std::memory_order_release);
}

}  // namespace torchcomms_pg::shm
