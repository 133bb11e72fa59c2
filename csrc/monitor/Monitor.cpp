#include "monitor/Monitor.hpp"

#include <algorithm>
#include <iterator>
#include <system_error>

#include "base/PerProcess.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

std::atomic<void (*)(Monitor::Clock::time_point) noexcept> ofRound{nullptr};

}  // namespace

Monitor& Monitor::get() {
  static PerProcess<Monitor> monitor;
  return monitor.get();
}

void Monitor::setRound(void (*body)(Clock::time_point now) noexcept) {
  ofRound = body;
}

Monitor::Hold::~Hold() {
  // Does nothing in a forked child, in which the thread does not exist. Does nothing in the
  // monitor's thread either, which cannot join itself, and so goes on. That thread destroys a Hold
  // only if it could not pass an object to another thread.
  if (&monitor_ == &get() && !monitorThread.isMine()) {
    monitor_.leave();
  }
}

void Monitor::enter() {
  LockGuard lifecycle(lifecycle_);
  if (holds_ == 0) {
    auto spare = std::make_unique<SpareThread>();
    {
      LockGuard lock(mutex_);
      stop_ = false;
    }
    try {
      thread_ = startThread("tcpg_monitor", [this] { run(); });
    } catch (const std::system_error& error) {
      raiseNoThread("the monitor", error.what());
    }
    lastRound_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    LockGuard held(spareMutex_);
    spare_ = std::move(spare);
  }
  ++holds_;
}

void Monitor::leave() {
  LockGuard lifecycle(lifecycle_);
  if (--holds_ > 0) {
    return;
  }
  {
    LockGuard lock(mutex_);
    stop_ = true;
  }
  {
    LockGuard lock(spareMutex_);
    spare_ = nullptr;
  }
  wake_.notify_all();
  thread_.join();
}

void Monitor::add(const std::shared_ptr<Watched>& watched) {
  auto list = std::make_shared<List>();
  std::shared_ptr<const List> former;  // freed after the lock is released
  LockGuard lock(mutex_);
  std::copy_if(
      watched_->begin(), watched_->end(), std::back_inserter(*list),
      [](const auto& known) { return !known.expired(); });
  list->push_back(watched);
  former = std::exchange(watched_, std::move(list));
}

std::shared_ptr<const Monitor::List> Monitor::watched() {
  LockGuard lock(mutex_);
  return watched_;
}

void Monitor::runDetached(std::function<void()> body) {
  // Shared, since startDetached() destroys its argument if no thread can be started.
  const auto shared = std::make_shared<std::function<void()>>(std::move(body));
  const auto once = [shared] { std::exchange(*shared, nullptr)(); };
  try {
    startDetached("tcpg_apart", once);
  } catch (const std::system_error& error) {
    LockGuard lock(spareMutex_);
    if (!spare_) {
      raiseNoThread("the monitor", error.what());
    }
    spare_->run(once);
  }
}

void Monitor::abortInFlight(const char* why) {
  for (const auto& known : *watched()) {
    if (const auto watched = known.lock()) {
      watched->abortInFlight(why);
    }
  }
}

std::vector<std::string> Monitor::failures() {
  std::vector<std::string> messages;
  for (const auto& known : *watched()) {
    const auto watched = known.lock();
    if (auto message = watched ? watched->failureMessage() : ""; !message.empty()) {
      messages.push_back(std::move(message));
    }
  }
  return messages;
}

void Monitor::run() {
  const ThreadRole::Taken role(monitorThread);
  UniqueLock lock(mutex_);
  while (!stop_) {
    const auto now = Clock::now();
    lastRound_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    const auto round = watched_;
    lock.unlock();
    if (auto* const body = ofRound.load(std::memory_order_relaxed)) {
      body(now);
    }
    for (const auto& known : *round) {
      if (const auto watched = known.lock()) {
        watched->check(now);
      }
    }
    lock.lock();
    wake_.wait_for(lock, kTick, [&]() REQUIRES(mutex_) { return stop_; });
  }
  lastRound_.store(0, std::memory_order_relaxed);
}

}  // namespace torchcomms_pg
