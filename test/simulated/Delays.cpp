#include "Delays.hpp"

#include <atomic>
#include <mutex>
#include <thread>

namespace simulated {

namespace {

std::mutex delaysMutex;
Delays delays;
std::atomic<uint64_t> delaysGeneration{1};

}  // namespace

void setDelays(const Delays& wanted) {
  const std::lock_guard lock(delaysMutex);
  delays = wanted;
  delaysGeneration.fetch_add(1, std::memory_order_release);
}

void Dawdler::dawdle() {
  const auto generation = delaysGeneration.load(std::memory_order_acquire);
  Delays now;
  {
    const std::lock_guard lock(delaysMutex);
    now = delays;
  }
  if (generation != generation_) {
    generation_ = generation;
    random_.seed(now.seed * 7919 + stream_);
  }
  if (now.longest.count() > 0 && std::bernoulli_distribution(now.probability)(random_)) {
    std::uniform_int_distribution<int64_t> length(0, now.longest.count());
    std::this_thread::sleep_for(std::chrono::microseconds(length(random_)));
  }
}

}  // namespace simulated
