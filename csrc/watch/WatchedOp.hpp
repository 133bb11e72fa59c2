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
  // Makes the operation that the calling thread is about to issue. `stack`: Python's.
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

  void setEntry(InFlightOps::Entry entry) { entry_ = entry; }
  InFlightOps::Entry entry() const { return entry_; }

  // Notes that the call has returned. `work`: to be asked for the end; null: it is not.
  void leave(c10::intrusive_ptr<c10d::Work> work);
  // Does the same for a call that gives no Work: the operation is in the device's current stream.
  void leaveInStream(c10::Device device);
  bool returned() const { return returned_.load(std::memory_order_acquire); }

  // Returns whether the Work has ended, and how; none: it has not, or is not asked. Does not take
  // the GIL, but may block in the backend.
  struct End {
    bool completed = false;
  };
  std::optional<End> ask() const noexcept;

  // Note, and return, when ask() has last said that it goes on; the epoch: never. One thread notes
  // at a time.
  void notePending(Clock::time_point at) {
    const auto latest = std::max(at, lastPending());
    lastPending_.store(latest.time_since_epoch().count(), std::memory_order_relaxed);
  }
  Clock::time_point lastPending() const {
    return Clock::time_point(Clock::duration(lastPending_.load(std::memory_order_relaxed)));
  }

  // Returns whether its thread is still in the call, as far as is known. False: it has left it by
  // an exception, as no post hook was called. None: Python is being asked, which takes kQuestion at
  // most. For the monitor's thread, as the next.
  std::optional<bool> inCall(Clock::time_point now);
  // Returns whether to ask, if nobody wants to know: the longer it has been in the call, the more
  // seldom, since it is asked with the GIL.
  bool looksAgain(Clock::time_point now) const { return question_ || now >= nextLook_; }
  static constexpr Milliseconds kQuestion{1000};

  // Returns true for the first caller, who is to end it.
  bool takeEnd() { return !over_.exchange(true, std::memory_order_acq_rel); }

  // Returns the future of the Work, which ends with it and calls back whoever wants to know; null:
  // its backend has none.
  static c10::intrusive_ptr<c10::ivalue::Future> futureOf(c10d::Work& work);

  // Lets go of the Work in the calling thread, which may wait for the GIL, as tensors that Python
  // knows take it when they go. To be called by the one who ended it, if nobody else has it.
  void drop() { work_.reset(); }

 private:
  struct Question;

  const std::shared_ptr<WatchedGroup> group_;
  RecordedOp recording_;
  const Operation op_;
  const uint64_t thread_;
  InFlightOps::Entry entry_;
  std::atomic<bool> returned_{false};
  std::atomic<bool> over_{false};
  std::atomic<Clock::rep> lastPending_{0};
  c10::intrusive_ptr<c10d::Work> work_;  // set before `returned_`, as the next
  std::optional<c10::Event> behind_;     // behind the operation in its stream
  std::shared_ptr<Question> question_;   // of the monitor's thread, as the next
  Clock::time_point nextLook_;
};

}  // namespace torchcomms_pg
