// The time at which a thread's awaited operation has ended, as a callback of the operation's future
// reports it. Independent of torch.
#pragma once

#include <atomic>
#include <chrono>
#include <type_traits>

namespace torchcomms_pg {

// Keeps the time of the end of one thread's latest awaited operation. The callback of an earlier
// operation may run at any time and in any thread, and has no effect, since its time of issue
// differs. Therefore the object is never destroyed: when its thread ends, a later thread takes it
// over.
class AwaitedEnd {
 public:
  using Clock = std::chrono::steady_clock;

  // A future's callback. It has two words and is trivially copyable, so that std::function does not
  // allocate memory for it, which another thread would free.
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

  // Begins the wait for the operation that was issued at this time. Returns the callback to call at
  // the operation's end.
  Callback await(Clock::time_point issued) {
    const auto since = issued.time_since_epoch().count();
    state_.store(since, std::memory_order_relaxed);
    return {this, since};
  }
  // Returns the time at which the awaited operation ended, or the epoch if its callback has not
  // run.
  Clock::time_point get() const {
    const auto state = state_.load(std::memory_order_relaxed);
    return Clock::time_point(Clock::duration(state < 0 ? -state : 0));
  }

 private:
  struct Owner;

  std::atomic<Clock::rep> state_{0};  // time of the issue, or minus the time of the end
  AwaitedEnd* next_ = nullptr;        // the next in the list of objects without a thread
};

}  // namespace torchcomms_pg
