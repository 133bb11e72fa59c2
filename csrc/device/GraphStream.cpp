#include "device/GraphStream.hpp"

#include <algorithm>
#include <iterator>

#include "base/TorchCompat.hpp"

namespace torchcomms_pg {

std::optional<GraphStream::Branch> GraphStream::branchFrom(const c10::Stream& issuer) {
  if (issuer.device_type() != c10::DeviceType::CUDA) {
    return std::nullopt;
  }
  dropEnded();
  LockGuard lock(mutex_);
  if (!stream_) {
    stream_ = device_.newStream(highPriority_);
  }
  if (!isCapturing(*stream_)) {
    ++capture_;
  }
  device_.record(issuer, /*timed=*/false)->block(*stream_);
  return Branch{*stream_, capture_};
}

bool GraphStream::openLocked(uint64_t capture) const {
  return stream_ && capture == capture_ && isCapturing(*stream_);
}

bool GraphStream::open(uint64_t capture) const {
  LockGuard lock(mutex_);
  return openLocked(capture);
}

void GraphStream::keep(uint64_t capture, std::shared_ptr<const void> object) {
  LockGuard lock(mutex_);
  kept_.emplace_back(capture, std::move(object));
  keeps_.store(true, std::memory_order_relaxed);
}

void GraphStream::dropEnded() {
  if (!keeps_.load(std::memory_order_relaxed)) {
    return;
  }
  decltype(kept_) ended;  // freed after the lock is released
  LockGuard lock(mutex_);
  const auto end = std::partition(
      kept_.begin(), kept_.end(),
      [&](const auto& entry) REQUIRES(mutex_) { return openLocked(entry.first); });
  ended.assign(std::make_move_iterator(end), std::make_move_iterator(kept_.end()));
  kept_.erase(end, kept_.end());
  keeps_.store(!kept_.empty(), std::memory_order_relaxed);
}

}  // namespace torchcomms_pg
