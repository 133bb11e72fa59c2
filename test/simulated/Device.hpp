// A simulated accelerator: a PrivateUse1 device in host memory whose streams and events are as
// asynchronous as those of a GPU.
//
// Nothing here waits where a GPU would not: an operator is queued in the current stream and runs on
// that stream's thread, and memory is used again in the order of the stream it was allocated on,
// which overwrites it first. So a program that lacks a wait computes wrong numbers, as it would on
// a GPU, and with delays in the streams it does so nearly every time.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "Delays.hpp"
#include "Mark.hpp"
#include "Rest.hpp"
#include "device/WorkerStream.hpp"

namespace simulated {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kDevices = 2;
inline constexpr unsigned char kPoison = 0xff;  // NaN, or -1

class Stream;

// The tasks that a stream recorded instead of running them, to be run again.
class Graph {
 public:
  using Step = std::function<void(Stream&)>;

  void add(Step step) { steps_.push_back(std::move(step)); }
  void replay(Stream& stream) const;

 private:
  std::vector<Step> steps_;
};

class Stream final : public torchcomms_pg::host::HostStream {
 public:
  Stream(c10::DeviceIndex device, c10::StreamId id);

  void enqueue(std::function<void()> task) override { add(std::move(task), /*delayed=*/true); }
  bool capture(const std::function<void()>& issue) override;
  // Adds a task. `delayed`: perhaps after a delay.
  void add(std::function<void()> task, bool delayed);

  // Called by the thread that queues here: null ends the recording.
  void record(Graph* graph) { graph_ = graph; }
  bool recording() const { return graph_ != nullptr; }

  bool idle() const { return pending_.load(std::memory_order_acquire) == 0; }

  // Waits for the mark in the stream's thread.
  void wait(std::shared_ptr<Mark> mark);
  bool waits() { return wait_.lasts(); }

  // Returns when nothing is queued; raises what an operator raised meanwhile.
  void synchronize();

  c10::DeviceIndex device() const { return device_; }
  c10::StreamId id() const { return id_; }

 private:
  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  Graph* graph_ = nullptr;
  std::atomic<int64_t> pending_{0};
  std::mutex mutex_;
  std::condition_variable done_;
  std::string error_;
  Wait wait_;
  Dawdler dawdler_;
  torchcomms_pg::WorkerStream worker_;
};

std::shared_ptr<Mark> record(Stream& stream);
void wait(Stream& stream, std::shared_ptr<Mark> mark);

c10::DeviceIndex currentDevice();
void setDevice(c10::DeviceIndex device);

Stream& find(const c10::Stream& stream);
Stream& current(c10::DeviceIndex device);
c10::Stream currentStream(c10::DeviceIndex device);
c10::Stream exchangeStream(const c10::Stream& stream);
// Returns a stream; those of high priority are separate.
c10::Stream newStream(c10::DeviceIndex device, bool highPriority);
// Sets whether whoever asks for an event waits until this is false again.
void hangDriver(bool hangs);
// Returns how often the calling thread has called the device for its streams and events.
uint64_t deviceCalls();
// Returns the ids of the streams of high priority in which something was queued.
std::vector<c10::StreamId> highPriorityStreams(c10::DeviceIndex device);
void synchronizeDevice(c10::DeviceIndex device);
// Returns whether every stream is idle or waits for a mark: see Rest.hpp.
bool settled();
// Returns how often the main thread, and how often others have asked for an event that had not
// come.
std::pair<uint64_t, uint64_t> earlyQueries();

// Memory of the current stream. A freed block is used again by that stream, at
// once as far as the host is concerned, and is poisoned then in the stream's
// order: not sooner, for a program may free what another stream still reads as
// long as the first waits for that before it allocates again. FSDP2 does.
c10::Allocator* allocator();
c10::Allocator* pinnedAllocator();
bool isPinned(const void* data);
// Returns the device of an address; -1: of no device.
c10::DeviceIndex deviceOf(const void* data);
// Keeps the memory from being used again before `stream` has done what is queued in it when the
// memory is freed.
void recordStream(const c10::DataPtr& memory, const c10::Stream& stream);

}  // namespace simulated
