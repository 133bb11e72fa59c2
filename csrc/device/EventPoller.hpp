// The thread that polls the events of one device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ScopeExit.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>

#include "base/Mutex.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg {

// Polls the events of one device, in its own thread. The driver may block this thread: a cudaFree
// behind a stuck kernel holds the context's lock until that kernel ends. The monitor, which must
// keep deadlines even then, does not query the device. Thread-safe.
class EventPoller {
 public:
  // An operation in a stream. The poller polls whether the operation has ended.
  class Awaited {
   public:
    virtual ~Awaited() = default;
    // Returns true if the stream has completed the operation, or if the device has failed.
    virtual bool ask() noexcept = 0;
    // Called once, after ask() has returned true. `self` is the poller's reference to this object.
    virtual void ended(std::shared_ptr<Awaited> self) noexcept = 0;
    // Returns the time at which ask() last returned false for this operation or an earlier one in
    // the stream; the epoch if ask() never did. For use in ended().
    std::chrono::steady_clock::time_point lastPending() const { return lastPending_; }

   private:
    friend class EventPoller;
    std::chrono::steady_clock::time_point lastPending_{};
  };

  // Polling intervals: the normal one, and the one after pollFast().
  static constexpr std::chrono::milliseconds kTick = Monitor::kTick;
  static constexpr std::chrono::milliseconds kHurriedTick{1};

  // Returns the device's only poller in this process. Pollers are never freed, since their threads
  // may be inside the driver when the process ends.
  static EventPoller& of(c10::Device device);
  explicit EventPoller(c10::Device device) : device_(device) {}  // for of()

  // Add and remove a user of the device. The thread ends some time after the last user has left.
  void join();
  void leave();

  // Starts the thread unless it runs. Raises std::runtime_error if no thread can be started.
  void start();

  // Polls every device now. Returns when ended() has been called for all operations that had ended,
  // or after `patience`. Does not wait for a thread that the driver has blocked for that long.
  static void askNow(std::chrono::milliseconds patience);

  // Adds an operation. Operations of one stream are polled in the order in which they were added.
  void add(c10::StreamId stream, std::shared_ptr<Awaited> awaited);

  // Makes the poller poll every kHurriedTick while the result lives.
  [[nodiscard]] auto pollFast() {
    hurry(1);
    return c10::make_scope_exit([this] { hurry(-1); });
  }

 private:
  using List = std::list<std::shared_ptr<Awaited>>;
  using Clock = std::chrono::steady_clock;
  struct Queue {
    List all;
    Clock::time_point lastPending{};
  };

  void run();
  void hurry(int change);
  // hasten() starts a round of polling and returns its number. awaitRound() waits for the round's
  // end, at most until `until`, and not if a round has lasted longer than `patience`.
  uint64_t hasten();
  void awaitRound(uint64_t round, Clock::time_point until, std::chrono::milliseconds patience);
  void askAll();

  const c10::Device device_;
  Mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable changed_;           // a round has ended, or no event is left
  std::atomic<pid_t> pid_{0};                 // process that started the thread, or 0
  bool started_ GUARDED_BY(mutex_) = false;   // true if the thread runs
  bool hastened_ GUARDED_BY(mutex_) = false;  // true if the next round begins at once
  uint64_t begun_ GUARDED_BY(mutex_) = 0;     // number of the latest round
  uint64_t ended_ GUARDED_BY(mutex_) = 0;     // number of the latest round that has ended
  Clock::time_point beganAt_ GUARDED_BY(mutex_);
  int users_ GUARDED_BY(mutex_) = 0;
  int hurried_ GUARDED_BY(mutex_) = 0;   // number of results of pollFast()
  bool idle_ GUARDED_BY(mutex_) = true;  // true if no event is left
  std::unordered_map<c10::StreamId, List> added_ GUARDED_BY(mutex_);
  std::unordered_map<c10::StreamId, Queue> awaited_;  // owned by the thread
};

}  // namespace torchcomms_pg
