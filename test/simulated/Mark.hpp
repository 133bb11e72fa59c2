// One record of an event. Knows nothing of torch.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace simulated {

// A mark that streams and threads wait for.
class Mark {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    set_ = true;
    time_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return set_; });
  }

  bool isSet() {
    const std::lock_guard lock(mutex_);
    return set_;
  }

  // Returns the time of a mark that is set.
  std::chrono::steady_clock::time_point time() {
    const std::lock_guard lock(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::chrono::steady_clock::time_point time_;
};

}  // namespace simulated
