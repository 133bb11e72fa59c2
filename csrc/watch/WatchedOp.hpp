// An operation of a watched group, from the call of its pre hook until it has ended.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "comm/InFlightOps.hpp"
#include "comm/RecordedOp.hpp"
#include "operation/Operation.hpp"
#include "recorder/Stack.hpp"

namespace torchcomms_pg {

class WatchedGroup;

// Kept by the group's list of operations in flight. Thread-safe.
class WatchedOp final {
 public:
  // Makes the operation that the calling thread is about to issue. `stack`: Python's stack.
  WatchedOp(
      std::shared_ptr<WatchedGroup> group,
      Operation op,
      RecordedOp::Recorders recorders,
      Stack stack);
  ~WatchedOp();
  WatchedOp(const WatchedOp&) = delete;
  WatchedOp& operator=(const WatchedOp&) = delete;

  WatchedGroup& group() const { return *group_; }
  const std::shared_ptr<WatchedGroup>& owner() const { return group_; }
  const Operation& operation() const { return op_; }
  const Stack& stack() const { return recording_.stack(); }
  RecordedOp& recording() { return recording_; }

  // Mark the operation's call as one of those that the group counts, and return once whether it is.
  void setCounted() { counted_.store(true, std::memory_order_relaxed); }
  bool takeCounted() { return counted_.exchange(false, std::memory_order_relaxed); }

  void setEntry(InFlightOps::Entry entry) { entry_ = entry; }
  InFlightOps::Entry entry() const { return entry_; }

  // Records that the call has returned. `work`: polled for the end unless it is null.
  void leave(c10::intrusive_ptr<c10d::Work> work);
  // Does the same for a call without a Work: the operation is in the device's current stream.
  void leaveInStream(c10::Device device);
  bool returned() const { return returned_.load(std::memory_order_acquire); }

  // Returns how the Work has ended, or nullopt if it has not ended or is not polled. Does not take
  // the GIL, but may block in the backend.
  struct End {
    bool completed = false;
  };
  std::optional<End> ask() const noexcept;

  // Record and return the time at which ask() last found the operation unfinished; the epoch
  // before. One thread records at a time.
  void notePending(Clock::time_point at) {
    const auto latest = std::max(at, lastPending());
    lastPending_.store(latest.time_since_epoch().count(), std::memory_order_relaxed);
  }
  Clock::time_point lastPending() const {
    return Clock::time_point(Clock::duration(lastPending_.load(std::memory_order_relaxed)));
  }

  // Returns whether the operation's thread is still in the call, as far as is known. Returns false
  // if the thread has left the call by an exception, so that no post hook was called; nullopt while
  // Python is being asked, which takes kQuestion at most. This function and the next are for the
  // monitor's thread.
  std::optional<bool> inCall(Clock::time_point now);
  // Returns whether it is time to ask without a diagnosis. The interval grows with the time in the
  // call, since each question takes the GIL.
  bool looksAgain(Clock::time_point now) const { return question_ || now >= nextLook_; }
  static constexpr Milliseconds kQuestion{1000};

  // Returns true for the first caller, which must end the operation.
  bool takeEnd() { return !over_.exchange(true, std::memory_order_acq_rel); }

  // Returns the Work's future, which calls its callbacks at the Work's end, or null if the backend
  // has none.
  static c10::intrusive_ptr<c10::ivalue::Future> futureOf(c10d::Work& work);

  // Releases the Work in the calling thread. That may wait for the GIL, which is needed to free
  // tensors that Python knows. Called by the thread that has ended the operation, if no other
  // thread holds the operation.
  void drop() { work_.reset(); }

 private:
  struct Question;

  const std::shared_ptr<WatchedGroup> group_;
  RecordedOp recording_;
  const Operation op_;
  const uint64_t thread_;
  InFlightOps::Entry entry_;
  std::atomic<bool> counted_{false};
  std::atomic<bool> returned_{false};
  std::atomic<bool> over_{false};
  std::atomic<Clock::rep> lastPending_{0};
  c10::intrusive_ptr<c10d::Work> work_;  // set before `returned_`, as is `behind_`
  std::optional<c10::Event> behind_;     // behind the operation in its stream
  std::shared_ptr<Question> question_;   // of the monitor's thread, as is `nextLook_`
  Clock::time_point nextLook_;
};

}  // namespace torchcomms_pg
