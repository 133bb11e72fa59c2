#include "monitor/Monitor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

// Leaked on purpose: at process exit communicators may still be watched, and a destructor would
// have to wait for the thread.
struct Instance {
  Monitor monitor;
  pid_t pid = getpid();
};
std::atomic<Instance*> instance{nullptr};

}  // namespace

Monitor& Monitor::get() {
  Instance* current = instance.load(std::memory_order_acquire);
  while (current == nullptr || current->pid != getpid()) {
    auto* fresh = new Instance();
    if (instance.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) {
      return fresh->monitor;
    }
    delete fresh;
  }
  return current->monitor;
}

void Monitor::add(Watched* watched) {
  std::lock_guard lifecycle(lifecycle_);
  std::lock_guard lock(mutex_);
  watched_.reserve(watched_.size() + 1);
  if (!thread_.joinable()) {
    auto spare = std::make_unique<SpareThread>();
    stop_ = false;
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      raiseNoThread("the monitor", error.what());
    }
    lastRound_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    std::lock_guard held(spareMutex_);
    spare_ = std::move(spare);
  }
  watched_.push_back(watched);
}

void Monitor::runApart(std::function<void()> body) {
  // Shared because a thread that cannot be started drops what it was given.
  const auto shared = std::make_shared<std::function<void()>>(std::move(body));
  const auto once = [shared] { std::exchange(*shared, nullptr)(); };
  try {
    startDetached("tcpg_apart", once);
  } catch (const std::system_error& error) {
    std::lock_guard lock(spareMutex_);
    if (!spare_) {
      raiseNoThread("the monitor", error.what());
    }
    spare_->run(once);
  }
}

void Monitor::remove(Watched* watched) {
  std::lock_guard lifecycle(lifecycle_);
  {
    std::lock_guard lock(mutex_);
    watched_.erase(std::remove(watched_.begin(), watched_.end(), watched), watched_.end());
    if (!watched_.empty() || !thread_.joinable()) {
      return;
    }
    stop_ = true;
  }
  {
    std::lock_guard lock(spareMutex_);
    spare_ = nullptr;
  }
  wake_.notify_all();
  thread_.join();
}

void Monitor::giveUp(const char* why) {
  std::lock_guard lock(mutex_);
  for (Watched* watched : watched_) {
    watched->giveUp(why);
  }
}

std::vector<std::string> Monitor::failures() {
  std::vector<std::string> messages;
  std::lock_guard lock(mutex_);
  for (const Watched* watched : watched_) {
    if (auto message = watched->failureMessage(); !message.empty()) {
      messages.push_back(std::move(message));
    }
  }
  return messages;
}

void Monitor::run() {
  pthread_setname_np(pthread_self(), "tcpg_monitor");
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const auto now = Clock::now();
    lastRound_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    for (Watched* watched : watched_) {
      watched->check(now);
    }
    wake_.wait_for(lock, kTick);
  }
  lastRound_.store(0, std::memory_order_relaxed);
}

}  // namespace torchcomms_pg
