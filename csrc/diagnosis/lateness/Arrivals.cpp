#include "diagnosis/lateness/Arrivals.hpp"

namespace torchcomms_pg {

void ArrivalLog::add(Point point) {
  LockGuard lock(mutex_);
  if (size_ > 0 && point.seq <= pointAt(size_ - 1).seq) {
    return;  // another thread has recorded a later number first
  }
  auto stride = stride_.load(std::memory_order_relaxed);
  const auto slow = point.at.time_since_epoch().count() > slowFrom_.load(std::memory_order_relaxed);
  if (slow && stride > 1) {
    stride /= 2;
  } else if (size_ == kMost && point.at - pointAt(0).at < kSpan) {
    stride *= 2;
    size_t left = 0;
    for (size_t place = 0; place < size_; ++place) {
      if (pointAt(place).seq % stride == 0) {
        pointAt(left++) = pointAt(place);
      }
    }
    size_ = left;
  }
  const auto soon = point.at + 2 * kSpan / static_cast<int>(kMost);
  slowFrom_.store(soon.time_since_epoch().count(), std::memory_order_relaxed);
  stride_.store(stride, std::memory_order_relaxed);
  if (point.seq % stride != 0) {
    return;
  }
  if (size_ == kMost) {
    first_ = (first_ + 1) % kMost;
    --size_;
  }
  pointAt(size_++) = point;
  latest_.store(point.seq, std::memory_order_relaxed);
}

Arrivals ArrivalLog::get() const {
  Arrivals all;
  LockGuard lock(mutex_);
  for (size_t place = 0; place < size_; ++place) {
    const auto& origin = points_[first_];
    const auto& point = points_[(first_ + place) % kMost];
    const auto since = [](auto duration) {
      return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
    };
    all.seqs.push_back(point.seq);
    all.at.push_back(since(point.at - origin.at));
    all.waited.push_back(since(point.waited - origin.waited));
    all.here.push_back(since(point.here - origin.here));
    all.threads.push_back(point.thread);
  }
  return all;
}

}  // namespace torchcomms_pg
