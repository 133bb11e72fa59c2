// A one-way stream of messages through shared memory, with one writer and one
// reader.
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
  uint64_t sequence;  // number of the message in its channel; checked
  int32_t tag;
  uint16_t type;
  uint16_t slot;  // slot in which the reader confirms the message; 0 if it does not
};
static_assert(sizeof(MessageHeader) <= kLine / 2, "a small message is to fit into one line");

// Number of slots of a channel, for messages whose senders wait until they are received. Slots are
// numbered from 1.
inline constexpr uint16_t kSlots = 512;

// State at the channel's beginning; zero-initialised. Cursors count bytes and never wrap.
struct ChannelControl {
  alignas(kLine) std::atomic<uint64_t> head;  // written up to here
  std::atomic<uint32_t> wantsRoom;            // the writer waits for the reader
  alignas(kLine) std::atomic<uint64_t> tail;  // read up to here
  // One bit for each slot, set by the reader and cleared by the writer.
  alignas(kLine) std::atomic<uint64_t> received[kSlots / 64];
};

// The part that writer and reader share. Each message starts on a new cache line, so that a header
// never wraps around.
class ChannelEnd {
 public:
  void attach(std::byte* memory, size_t bytes) {
    control_ = reinterpret_cast<ChannelControl*>(memory);
    data_ = memory + sizeof(ChannelControl);
    capacity_ = (bytes - sizeof(ChannelControl)) / kLine * kLine;
    piece_ = std::min(kPiece, capacity_ / 4);
  }

 protected:
  // Size of a piece: large enough to make publishing cheap, small enough for the reader to copy one
  // piece while the writer copies the next.
  static constexpr size_t kPiece = 16 << 10;

  // Number of pieces per call; the limit keeps a message from delaying the others.
  static constexpr int kPiecesPerCall = 8;

  // Number of bytes at the cursor that do not wrap.
  size_t contiguous() const { return capacity_ - cursor_ % capacity_; }
  std::byte* at() const { return data_ + cursor_ % capacity_; }
  void padToLine() { cursor_ = (cursor_ + kLine - 1) / kLine * kLine; }

  ChannelControl* control_ = nullptr;
  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  size_t piece_ = 0;
  uint64_t cursor_ = 0;  // of this side
  uint64_t other_ = 0;   // of the other side, as last seen
};

class ChannelWriter : public ChannelEnd {
 public:
  // Continues to write one message; call until it returns true, once all is written. Calls
  // published() after each piece. `moved` counts the bytes written, initially zero.
  template <class Published>
  bool write(
      const MessageHeader& header,
      const std::byte* content,
      size_t bytes,
      size_t& moved,
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
  // Returns the free bytes. Negative if padding after the last message covers a part of a line that
  // the reader has not read yet.
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

  // Enters the message whose header peek() has copied.
  void begin() { cursor_ += sizeof(MessageHeader); }

  // Continues to read the message's content; returns true once all is read. Calls freed() if the
  // writer waits for room.
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
