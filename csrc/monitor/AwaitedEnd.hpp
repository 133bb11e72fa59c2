// When the operation that a thread waits for has ended, as its future tells. Knows nothing of
// torch.
#pragma once

#include <atomic>
#include <chrono>
#include <type_traits>

namespace torchcomms_pg {

// One of each thread, for the operation that it has begun to wait for last. Futures of earlier ones
// may end at any time, from any thread: each knows by the time of its issue that it is not asked
// for any more. So it is never destroyed, and a thread that ends leaves it to another.
class AwaitedEnd {
 public:
  using Clock = std::chrono::steady_clock;

  // A future's callback. std::function keeps one of two words that are trivially copied in itself,
  // where another costs memory that one thread allocates and another frees.
  class Callback {
   public:
    void operator()(const auto& /*future*/) const {
      auto awaited = issued_;
      const auto now = Clock::now().time_since_epoch().count();
      end_->state_.compare_exchange_strong(awaited, -now, std::memory_order_relaxed);
    }

   private:
    friend class AwaitedEnd;
    Callback(AwaitedEnd* end, Clock::rep issued) : end_(end), issued_(issued) {}

    AwaitedEnd* end_;
    Clock::rep issued_;
  };
  static_assert(std::is_trivially_copyable_v<Callback> && sizeof(Callback) == 2 * sizeof(void*));

  // Returns the calling thread's object.
  static AwaitedEnd& ofThread();

  // Begins to wait for an operation, whose end calls the callback.
  Callback await(Clock::time_point issued) {
    const auto since = issued.time_since_epoch().count();
    state_.store(since, std::memory_order_relaxed);
    return {this, since};
  }
  // Returns when that operation ended, or the epoch if that is not known.
  Clock::time_point get() const {
    const auto state = state_.load(std::memory_order_relaxed);
    return Clock::time_point(Clock::duration(state < 0 ? -state : 0));
  }

 private:
  struct Owner;

  std::atomic<Clock::rep> state_{0};  // time of the issue, or minus the time of the end
  AwaitedEnd* next_ = nullptr;        // among those that no thread has
};

}  // namespace torchcomms_pg
