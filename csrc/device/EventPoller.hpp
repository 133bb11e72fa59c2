// The thread that polls the events of one device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "monitor/Monitor.hpp"

namespace torchcomms_pg {

// There is one poller per device of the process, each with its own thread, since the driver may
// block a thread that queries an event: a cudaFree behind a stuck kernel holds the context's lock
// until that kernel ends. The monitor must keep its deadlines meanwhile, and so queries nothing of
// the device. Thread-safe.
class EventPoller {
 public:
  // An operation in a stream whose end the poller waits for.
  class Awaited {
   public:
    virtual ~Awaited() = default;
    // Returns whether the stream has passed the operation. Also true if the device has failed.
    virtual bool ask() noexcept = 0;
    // Called once, after ask() has returned true. `self` is the poller's reference to this object.
    virtual void ended(std::shared_ptr<Awaited> self) noexcept = 0;
    // Returns the time at which ask() last returned false for this operation or an earlier one in
    // the stream, or the epoch if it never did. For use in ended().
    std::chrono::steady_clock::time_point lastPending() const { return lastPending_; }

   private:
    friend class EventPoller;
    std::chrono::steady_clock::time_point lastPending_{};
  };

  // Polling intervals: the normal one, and while a thread waits for nothing but an event.
  static constexpr std::chrono::milliseconds kTick = Monitor::kTick;
  static constexpr std::chrono::milliseconds kHurriedTick{1};

  // Returns the device's only poller. Never freed: its thread may be inside the driver when the
  // process ends.
  static EventPoller& of(c10::Device device);
  explicit EventPoller(c10::Device device) : device_(device) {}  // for of()

  // Count the users of the device. The thread ends some time after the last user has left.
  void join();
  void leave();

  // Starts the thread. Raises std::runtime_error if none can be started.
  void start();

  // Polls the events of every device now, and returns when ended() has been called for those that
  // have happened. Waits no longer than `patience`, and not for a thread that the driver has
  // already blocked for that long.
  static void askNow(std::chrono::milliseconds patience);

  // Adds an operation. Operations of one stream are polled in the order in which they were added.
  void add(c10::StreamId stream, std::shared_ptr<Awaited> awaited);

  // Makes the poller poll every kHurriedTick while this object lives.
  class FastPolling {
   public:
    explicit FastPolling(EventPoller& watch);
    ~FastPolling();
    FastPolling(const FastPolling&) = delete;
    FastPolling& operator=(const FastPolling&) = delete;

   private:
    EventPoller& watch_;
  };

 private:
  using List = std::list<std::shared_ptr<Awaited>>;
  using Clock = std::chrono::steady_clock;
  struct Queue {
    List all;
    Clock::time_point lastPending{};
  };

  void run();
  // Start a round now, and wait until it has ended. hasten() returns the round's number.
  uint64_t hasten();
  void awaitRound(uint64_t round, Clock::time_point until, std::chrono::milliseconds patience);
  void askAll();

  const c10::Device device_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable changed_;  // a round has ended, or no event is left
  std::atomic<pid_t> pid_{0};        // the process in which the thread runs
  bool started_ = false;
  bool hastened_ = false;
  uint64_t begun_ = 0;  // number of the latest round
  uint64_t ended_ = 0;
  Clock::time_point beganAt_;
  int users_ = 0;
  int hurried_ = 0;
  bool idle_ = true;
  std::unordered_map<c10::StreamId, List> added_;
  std::unordered_map<c10::StreamId, Queue> awaited_;  // owned by the thread
};

}  // namespace torchcomms_pg
