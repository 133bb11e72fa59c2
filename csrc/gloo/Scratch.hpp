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
  struct GiveBack {
    Scratch* owner;
    size_t bytes;
    void operator()(char* data) const { owner->giveBack(std::unique_ptr<char[]>(data), bytes); }
  };
  // Memory that returns to its owner when the block is destroyed. Not initialized.
  using Block = std::unique_ptr<char[], GiveBack>;

  Block take(size_t bytes) {
    for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
      if (kept->second >= bytes && kept->second <= 2 * bytes + kPage) {
        Block block(kept->first.release(), {this, kept->second});
        total_ -= kept->second;
        kept_.erase(kept);
        return block;
      }
    }
    return {new char[bytes], {this, bytes}};
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
