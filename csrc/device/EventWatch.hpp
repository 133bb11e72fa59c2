// The thread that asks the events of one device whether they have happened.
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

// A watch for each device of the process, with a thread of its own, since the driver may hold up a
// thread that asks for an event: a cudaFree behind a stuck kernel keeps the context's lock until
// that kernel ends. The monitor, which has to see deadlines meanwhile, asks nothing of the device.
// Thread-safe.
class EventWatch {
 public:
  // An operation in a stream, whose end is awaited.
  class Awaited {
   public:
    virtual ~Awaited() = default;
    // Returns whether the stream is past it. Also true when the device has failed.
    virtual bool ask() noexcept = 0;
    // Called once, when ask() is true. `self` is the watch's reference to this.
    virtual void ended(std::shared_ptr<Awaited> self) noexcept = 0;
    // Returns when ask() was last false, of this or one before it in the stream; the epoch: never.
    // Of use to ended().
    std::chrono::steady_clock::time_point lastPending() const { return lastPending_; }

   private:
    friend class EventWatch;
    std::chrono::steady_clock::time_point lastPending_{};
  };

  // Intervals at which events are asked: normally, and while a thread waits for nothing else.
  static constexpr std::chrono::milliseconds kTick = Monitor::kTick;
  static constexpr std::chrono::milliseconds kHurriedTick{1};

  // Returns the device's only watch. Never freed: its thread may be inside the driver when the
  // process ends.
  static EventWatch& of(c10::Device device);
  explicit EventWatch(c10::Device device) : device_(device) {}  // for of()

  // Count the users of the device; the thread ends some time after the last has left.
  void join();
  void leave();

  // Starts the thread. Raises std::runtime_error if none can be started.
  void start();

  // Asks the events of every device now, and returns when what has happened has been told. Does not
  // wait longer than `patience`, nor for a thread that the driver has held up for that long.
  static void askNow(std::chrono::milliseconds patience);

  // Adds an operation. Those of one stream are asked in the order in which they came.
  void add(c10::StreamId stream, std::shared_ptr<Awaited> awaited);

  // Asks events as often as kHurriedTick while it lives.
  class Hurry {
   public:
    explicit Hurry(EventWatch& watch);
    ~Hurry();
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;

   private:
    EventWatch& watch_;
  };

 private:
  using List = std::list<std::shared_ptr<Awaited>>;
  using Clock = std::chrono::steady_clock;
  struct Queue {
    List all;
    Clock::time_point lastPending{};
  };

  void run();
  // Have a round begin now, and wait until it has ended. Returns the number of the round.
  uint64_t hasten();
  void awaitRound(uint64_t round, Clock::time_point until, std::chrono::milliseconds patience);
  void askAll();

  const c10::Device device_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable changed_;  // a round has ended, or there is nothing to ask
  std::atomic<pid_t> pid_{0};        // the process of the thread
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
