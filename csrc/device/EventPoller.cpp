#include "device/EventPoller.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "base/Capture.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

// The pollers of this process, by device.
struct Watches {
  Mutex mutex;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, EventPoller> all GUARDED_BY(mutex);
};
Watches& watches() {
  static PerProcess<Watches> ofProcess;
  return ofProcess.get();
}

}  // namespace

EventPoller& EventPoller::of(c10::Device device) {
  LockGuard lock(watches().mutex);
  return watches().all.try_emplace({device.type(), device.index()}, device).first->second;
}

void EventPoller::askNow(std::chrono::milliseconds patience) {
  const auto until = Clock::now() + patience;
  std::vector<std::pair<EventPoller*, uint64_t>> rounds;
  {
    LockGuard lock(watches().mutex);
    for (auto& [device, watch] : watches().all) {
      if (watch.pid_.load(std::memory_order_relaxed) == getpid()) {  // started in this process
        rounds.emplace_back(&watch, watch.hasten());
      }
    }
  }
  for (const auto& [watch, round] : rounds) {
    watch->awaitRound(round, until, patience);
  }
}

uint64_t EventPoller::hasten() {
  LockGuard lock(mutex_);
  hastened_ = !idle_;
  wake_.notify_one();
  return begun_ + 1;  // the current round may have polled an event before its time
}

void EventPoller::awaitRound(
    uint64_t round, Clock::time_point until, std::chrono::milliseconds patience) {
  UniqueLock lock(mutex_);
  const bool stuck = begun_ != ended_ && Clock::now() - beganAt_ > patience;
  if (!stuck) {
    changed_.wait_until(
        lock, until, [&]() REQUIRES(mutex_) { return ended_ >= round || idle_ || !started_; });
  }
}

void EventPoller::join() {
  LockGuard lock(mutex_);
  ++users_;
}

void EventPoller::leave() {
  {
    LockGuard lock(mutex_);
    --users_;
  }
  wake_.notify_one();
}

void EventPoller::start() {
  LockGuard lock(mutex_);
  if (started_) {
    return;
  }
  startDetached("tcpg_events", "operations of an accelerator", [this] { run(); });
  started_ = true;
  pid_.store(getpid(), std::memory_order_relaxed);
}

void EventPoller::add(c10::StreamId stream, std::shared_ptr<Awaited> awaited) {
  bool wake = false;
  {
    LockGuard lock(mutex_);
    added_[stream].push_back(std::move(awaited));
    wake = std::exchange(idle_, false);
  }
  if (wake) {
    wake_.notify_one();
  }
}

void EventPoller::run() {
  // Without this call the first query would create a context on device 0.
  c10::impl::VirtualGuardImpl(device_.type()).uncheckedSetDevice(device_);
  if (device_.is_cuda()) {
    useThreadLocalCaptureMode();
  }
  UniqueLock lock(mutex_);
  for (;;) {
    idle_ = awaited_.empty() && added_.empty();
    changed_.notify_all();
    wake_.wait(lock, [&]() REQUIRES(mutex_) { return !idle_ || users_ == 0; });
    if (idle_) {
      started_ = false;
      return;
    }
    // Waits first: an operation that has just been added has most likely not ended.
    if (!std::exchange(hastened_, false)) {
      wake_.wait_for(lock, hurried_ > 0 ? kHurriedTick : kTick);
      hastened_ = false;
    }
    ++begun_;
    beganAt_ = Clock::now();
    for (auto& [stream, queue] : added_) {
      auto& all = awaited_[stream].all;
      all.splice(all.end(), queue);
    }
    added_.clear();
    lock.unlock();
    askAll();
    lock.lock();
    ended_ = begun_;
  }
}

void EventPoller::askAll() {
  for (auto stream = awaited_.begin(); stream != awaited_.end();) {
    auto& queue = stream->second.all;
    while (!queue.empty() && queue.front()->ask()) {
      auto ended = std::move(queue.front());
      queue.pop_front();
      auto& told = *ended;
      told.lastPending_ = stream->second.lastPending;
      told.ended(std::move(ended));
    }
    stream->second.lastPending = Clock::now();
    stream = queue.empty() ? awaited_.erase(stream) : std::next(stream);
  }
}

void EventPoller::hurry(int change) {
  {
    LockGuard lock(mutex_);
    hurried_ += change;
  }
  wake_.notify_one();
}

}  // namespace torchcomms_pg
