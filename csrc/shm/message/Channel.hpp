// A one-way stream of messages through shared memory, with one writer and one reader.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "shm/segment/Layout.hpp"

namespace torchcomms_pg::shm {

struct MessageHeader {
  uint64_t count;
  uint64_t sequence;  // number of the message in its channel, from 0; the reader checks it
  int32_t tag;
  uint16_t type;
  uint16_t slot;  // slot in which the reader confirms the message, or 0 for no confirmation
};
static_assert(sizeof(MessageHeader) <= kLine / 2, "a small message is to fit into one line");

// Number of slots of a channel, numbered from 1. A message has a slot if its sender waits until the
// message has been received.
inline constexpr uint16_t kSlots = 512;

// State at the beginning of a channel's memory; zero at first. `head` and `tail` count bytes from
// the channel's first byte on and never wrap.
struct ChannelControl {
  alignas(kLine) std::atomic<uint64_t> head;  // bytes written
  std::atomic<uint32_t> wantsRoom;            // 1 if the writer waits for room, else 0
  alignas(kLine) std::atomic<uint64_t> tail;  // bytes read
  // One bit for each slot. The reader sets the bit when the slot's message has been received, and
  // the writer clears the bit.
  alignas(kLine) std::atomic<uint64_t> received[kSlots / 64];
};

// The members that writer and reader have in common. Each message starts on a new cache line, so
// that a header never wraps around.
class ChannelEnd {
 public:
  void attach(std::byte* memory, size_t bytes) {
    control_ = reinterpret_cast<ChannelControl*>(memory);
    data_ = memory + sizeof(ChannelControl);
    capacity_ = (bytes - sizeof(ChannelControl)) / kLine * kLine;
    piece_ = std::min(kPiece, capacity_ / 4);
  }

 protected:
  // Limit of the bytes of a piece: large enough to make publishing cheap, small enough for the
  // reader to copy one piece while the writer copies the next.
  static constexpr size_t kPiece = 16 << 10;

  // Limit of the pieces that one call moves, so that a long message does not delay other messages.
  static constexpr int kPiecesPerCall = 8;

  // Returns the number of bytes from the cursor to the end of `data_`, where the channel wraps
  // around.
  size_t contiguous() const { return capacity_ - cursor_ % capacity_; }
  std::byte* at() const { return data_ + cursor_ % capacity_; }
  void padToLine() { cursor_ = (cursor_ + kLine - 1) / kLine * kLine; }

  ChannelControl* control_ = nullptr;
  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  size_t piece_ = 0;
  uint64_t cursor_ = 0;  // bytes that this side has written or read
  uint64_t other_ = 0;   // the other side's cursor, as last seen
};

class ChannelWriter : public ChannelEnd {
 public:
  // Writes the next pieces of a message, and calls published() after each. Returns true once the
  // whole message is written; call again until then. `moved` is the number of content bytes written
  // so far, and zero before the first call.
  template <class Published>
  bool write(
      const MessageHeader& header, const std::byte* content, size_t bytes, size_t& moved,
      const Published& published) {
    if (!begun_) {
      if (room() < static_cast<int64_t>(kLine)) return false;
      std::memcpy(at(), &header, sizeof header);
      cursor_ += sizeof header;
      begun_ = true;
    }
    for (int piece = 0; piece < kPiecesPerCall; ++piece) {
      size_t size = 0;
      if (moved < bytes) {
        const int64_t free = room();
        if (free <= 0) return false;
        size = std::min({bytes - moved, static_cast<size_t>(free), contiguous(), piece_});
        std::memcpy(at(), content + moved, size);
      }
      moved += size;
      cursor_ += size;
      const bool complete = moved == bytes;
      if (complete) {
        padToLine();
        begun_ = false;
      }
      control_->head.store(cursor_, std::memory_order_release);
      published();
      if (complete) return true;
    }
    return false;
  }

  // Calls found(slot) for each slot whose message has been received since the last call.
  template <class Found>
  void forReceived(const Found& found) {
    for (size_t word = 0; word < std::size(control_->received); ++word) {
      auto& bits = control_->received[word];
      if (bits.load(std::memory_order_relaxed) == 0) continue;
      for (uint64_t left = bits.exchange(0, std::memory_order_acquire); left != 0;
           left &= left - 1) {
        found(static_cast<uint16_t>(word * 64 + std::countr_zero(left) + 1));
      }
    }
  }

 private:
  // Returns the number of free bytes. It is negative if the padding after the last message reaches
  // into a line that the reader has not finished.
  int64_t room() {
    const auto free = [&] { return static_cast<int64_t>(capacity_ - (cursor_ - other_)); };
    if (free() >= static_cast<int64_t>(kLine)) return free();
    other_ = control_->tail.load(std::memory_order_acquire);
    if (free() >= static_cast<int64_t>(kLine)) return free();
    if (control_->wantsRoom.load(std::memory_order_relaxed) == 0) {
      control_->wantsRoom.store(1, std::memory_order_relaxed);
      // Pairs with the fence in ChannelReader::read(): the reader sees `wantsRoom`, or the writer
      // sees the new tail.
      std::atomic_thread_fence(std::memory_order_seq_cst);
      other_ = control_->tail.load(std::memory_order_acquire);
    }
    return free();
  }

  bool begun_ = false;
};

class ChannelReader : public ChannelEnd {
 public:
  // Copies the next message's header. Returns false if no message has been published.
  bool peek(MessageHeader& header) {
    if (available() == 0) return false;
    std::memcpy(&header, at(), sizeof header);
    return true;
  }

  // Moves the cursor past the header that peek() has copied, to the message's content.
  void begin() { cursor_ += sizeof(MessageHeader); }

  // Reads the next pieces of the message's content, and calls freed() if the writer waits for room.
  // Returns true once all content is read. `moved` is the number of bytes read so far.
  template <class Freed>
  bool read(std::byte* out, size_t bytes, size_t& moved, const Freed& freed) {
    for (int piece = 0; piece < kPiecesPerCall; ++piece) {
      if (moved < bytes && available() == 0) return false;
      const size_t size =
          std::min({bytes - moved, static_cast<size_t>(other_ - cursor_), contiguous(), piece_});
      if (size > 0) std::memcpy(out + moved, at(), size);
      moved += size;
      cursor_ += size;
      const bool complete = moved == bytes;
      if (complete) padToLine();
      control_->tail.store(cursor_, std::memory_order_release);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (control_->wantsRoom.load(std::memory_order_relaxed) != 0) {
        control_->wantsRoom.store(0, std::memory_order_relaxed);
        freed();
      }
      if (complete) return true;
    }
    return false;
  }

  void setReceived(uint16_t slot) {
    const uint64_t bit = uint64_t{1} << (slot - 1) % 64;
    control_->received[(slot - 1) / 64].fetch_or(bit, std::memory_order_release);
  }

 private:
  uint64_t available() {
    if (other_ == cursor_) other_ = control_->head.load(std::memory_order_acquire);
    return other_ - cursor_;
  }
};

}  // namespace torchcomms_pg::shm
