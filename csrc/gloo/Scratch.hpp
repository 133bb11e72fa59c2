// Temporary memory of collectives, kept for reuse.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace torchcomms_pg::gloo {

// Keeps released blocks, up to kMost bytes together: the first write to new memory takes a page
// fault for every 4 KiB, a third of a copy's time. Not thread-safe; has to outlive its blocks.
class Scratch {
 public:
  // Memory that returns to its owner when the block is destroyed. Not initialized.
  class Block {
   public:
    Block() = default;
    Block(Scratch* owner, std::unique_ptr<char[]> data, size_t bytes)
        : owner_(owner), data_(std::move(data)), bytes_(bytes) {}
    Block(Block&& other) noexcept { swap(other); }
    Block& operator=(Block&& other) noexcept {
      Block(std::move(other)).swap(*this);
      return *this;
    }
    ~Block() {
      if (owner_ != nullptr) owner_->giveBack(std::move(data_), bytes_);
    }

    char* data() const { return data_.get(); }
    explicit operator bool() const { return data_ != nullptr; }

   private:
    void swap(Block& other) noexcept {
      std::swap(owner_, other.owner_);
      std::swap(data_, other.data_);
      std::swap(bytes_, other.bytes_);
    }

    Scratch* owner_ = nullptr;
    std::unique_ptr<char[]> data_;
    size_t bytes_ = 0;
  };

  Block take(size_t bytes) {
    for (auto& kept : kept_) {
      if (kept.second >= bytes && kept.second <= 2 * bytes + kPage) {
        std::swap(kept, kept_.back());
        Block block(this, std::move(kept_.back().first), kept_.back().second);
        total_ -= kept_.back().second;
        kept_.pop_back();
        return block;
      }
    }
    return {this, std::make_unique_for_overwrite<char[]>(bytes), bytes};
  }

 private:
  static constexpr size_t kMost = 16 << 20;
  static constexpr size_t kPage = 4096;

  void giveBack(std::unique_ptr<char[]> data, size_t bytes) {
    if (total_ + bytes <= kMost) {
      total_ += bytes;
      kept_.emplace_back(std::move(data), bytes);
    }
  }

  std::vector<std::pair<std::unique_ptr<char[]>, size_t>> kept_;
  size_t total_ = 0;
};

}  // namespace torchcomms_pg::gloo
