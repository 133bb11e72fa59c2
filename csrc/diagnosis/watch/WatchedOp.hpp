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
#include "diagnosis/group/GroupActivity.hpp"
#include "monitor/MonitorThread.hpp"
#include "operation/Operation.hpp"
#include "recorder/RecordedOp.hpp"
#include "recorder/Stack.hpp"

namespace torchcomms_pg {

class WatchedGroup;

// One operation. The group's list of operations in flight keeps it. Thread-safe.
class WatchedOp final {
 public:
  // Describes an operation that the calling thread is about to issue. `stack`: Python's stack.
  WatchedOp(
      std::shared_ptr<WatchedGroup> group, Operation op, RecordedOp::Recorders recorders,
      Stack stack);
  ~WatchedOp();
  WatchedOp(const WatchedOp&) = delete;
  WatchedOp& operator=(const WatchedOp&) = delete;

  WatchedGroup& group() const { return *group_; }
  const std::shared_ptr<WatchedGroup>& owner() const { return group_; }
  const Operation& operation() const { return op_; }
  const Stack& stack() const { return recording_.stack(); }
  RecordedOp& recording() { return recording_; }

  // setCounted() marks the call as one that the group counts. takeCounted() removes the mark, and
  // returns whether there was one.
  void setCounted() { counted_.store(true, std::memory_order_relaxed); }
  bool takeCounted() { return counted_.exchange(false, std::memory_order_relaxed); }

  void setEntry(InFlightOps::Entry entry) { entry_ = entry; }
  InFlightOps::Entry entry() const { return entry_; }

  // Records that the call has returned. `work`: ask() polls it for the end, unless it is null.
  void leave(c10::intrusive_ptr<c10d::Work> work);
  // Does the same for a call that gave no Work, but put the operation into the current stream.
  void leaveInStream(c10::Device device);
  // Returns the thread that is in wait() of the Work of an operation whose call has returned.
  GroupActivity::Waiter waiter() const;
  bool returned() const { return returned_.load(std::memory_order_acquire); }

  // Returns how the operation has ended, or nullopt if it has not ended or is not polled. Does not
  // take the GIL, but may block in the backend.
  struct End {
    bool completed = false;
    bool failed = false;  // the backend has reported an error
  };
  std::optional<End> ask() const noexcept;

  // Record and return the latest time at which ask() found the operation unfinished, or the epoch
  // if it never has. One thread records at a time.
  void notePending(Clock::time_point at) {
    const auto latest = std::max(at, lastPending());
    lastPending_.store(latest.time_since_epoch().count(), std::memory_order_relaxed);
  }
  Clock::time_point lastPending() const {
    return Clock::time_point(Clock::duration(lastPending_.load(std::memory_order_relaxed)));
  }

  // Returns false if the operation's thread has left the call by an exception, so that no post hook
  // was called. Returns true if it has not, or if that is unknown. Returns nullopt while Python is
  // being asked, which takes kQuestion at most.
  std::optional<bool> inCall(Clock::time_point now) REQUIRES(monitorThread);
  // Returns whether inCall() is due even without a diagnosis. The interval grows with the time
  // since the issue, since each question takes the GIL.
  bool looksAgain(Clock::time_point now) const REQUIRES(monitorThread) {
    return question_ || now >= nextLook_;
  }
  static constexpr Milliseconds kQuestion{1000};

  // Returns true to the first caller only, which must end the operation.
  bool takeEnd() { return !over_.exchange(true, std::memory_order_acq_rel); }

  // Returns the Work's future, which calls its callbacks at the Work's end. Returns null if the
  // Work has no future, or is a class of Python.
  static c10::intrusive_ptr<c10::ivalue::Future> futureOf(c10d::Work& work);

  // Releases the Work in the calling thread. May wait for the GIL, which is needed to free tensors
  // that Python knows. Call it only after the end, if no other thread holds the operation.
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
  c10::intrusive_ptr<c10d::Work> work_;  // set before `returned_`, like `behind_`
  std::optional<c10::Event> behind_;     // event behind the operation in its stream
  std::shared_ptr<Question> question_ GUARDED_BY(monitorThread);
  Clock::time_point nextLook_ GUARDED_BY(monitorThread);
};

}  // namespace torchcomms_pg
