#include "device/EventWatch.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <iterator>
#include <map>
#include <utility>

#include "base/Capture.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

EventWatch& EventWatch::of(c10::Device device) {
  struct All {
    std::mutex mutex;
    std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, EventWatch> watches;
  };
  static PerProcess<All> ofProcess;
  auto& all = ofProcess.get();
  std::lock_guard lock(all.mutex);
  return all.watches.try_emplace({device.type(), device.index()}, device).first->second;
}

void EventWatch::join() {
  std::lock_guard lock(mutex_);
  ++users_;
}

void EventWatch::leave() {
  {
    std::lock_guard lock(mutex_);
    --users_;
  }
  wake_.notify_one();
}

void EventWatch::start() {
  std::lock_guard lock(mutex_);
  if (started_) {
    return;
  }
  startDetached("tcpg_events", "operations of an accelerator", [this] { run(); });
  started_ = true;
}

void EventWatch::add(c10::StreamId stream, std::shared_ptr<Awaited> awaited) {
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    added_[stream].push_back(std::move(awaited));
    wake = std::exchange(idle_, false);
  }
  if (wake) {
    wake_.notify_one();
  }
}

void EventWatch::run() {
  // Sets the device: without that the first question would make a context on device 0.
  c10::impl::VirtualGuardImpl(device_.type()).uncheckedSetDevice(device_);
  if (device_.is_cuda()) {
    harmNoCudaCapture();
  }
  std::unique_lock lock(mutex_);
  for (;;) {
    idle_ = awaited_.empty() && added_.empty();
    wake_.wait(lock, [&] { return !idle_ || users_ == 0; });
    if (idle_) {
      started_ = false;
      return;
    }
    // Waits first: what has just been added has most likely not ended.
    wake_.wait_for(lock, hurried_ > 0 ? kHurriedTick : kTick);
    for (auto& [stream, queue] : added_) {
      auto& all = awaited_[stream];
      all.splice(all.end(), queue);
    }
    added_.clear();
    lock.unlock();
    askAll();
    lock.lock();
  }
}

void EventWatch::askAll() {
  for (auto stream = awaited_.begin(); stream != awaited_.end();) {
    auto& queue = stream->second;
    while (!queue.empty() && queue.front()->ask()) {
      auto ended = std::move(queue.front());
      queue.pop_front();
      auto& told = *ended;
      told.ended(std::move(ended));
    }
    stream = queue.empty() ? awaited_.erase(stream) : std::next(stream);
  }
}

EventWatch::Hurry::Hurry(EventWatch& watch) : watch_(watch) {
  {
    std::lock_guard lock(watch_.mutex_);
    ++watch_.hurried_;
  }
  watch_.wake_.notify_one();
}

EventWatch::Hurry::~Hurry() {
  std::lock_guard lock(watch_.mutex_);
  --watch_.hurried_;
}

}  // namespace torchcomms_pg
