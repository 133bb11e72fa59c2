// A process group of another backend whose ranks diagnose which of them holds it up.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/AtomicShared.hpp"
#include "base/Mutex.hpp"
#include "base/TorchCompat.hpp"
#include "device/EventPoller.hpp"
#include "diagnosis/group/GroupActivity.hpp"
#include "diagnosis/group/ProcessActivity.hpp"
#include "diagnosis/group/StandingVerdicts.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "diagnosis/status/Hosts.hpp"
#include "diagnosis/watch/WatchedOp.hpp"
#include "handle/OwnProcess.hpp"
#include "monitor/Monitor.hpp"
#include "operation/Operation.hpp"
#include "recorder/RecordedOp.hpp"

namespace torchcomms_pg {

// The operations of a group on one type of device: their numbers, what is in flight, and this
// rank's part in their diagnoses. It fails nothing and waits for nothing. Construct by
// Monitor::watch(). Thread-safe.
class WatchedGroup final : public std::enable_shared_from_this<WatchedGroup>,
                           public Monitor::Watched,
                           public GroupActivity {
 public:
  WatchedGroup(Group group, int rank, int size, c10::DeviceType type, Milliseconds timeout);
  ~WatchedGroup() override;

  // Takes part in diagnoses, through the group's store. Raises the store's errors. `compares`:
  // warns if other ranks have given the group's name to other members.
  void open(const c10::intrusive_ptr<c10d::Store>& store, bool compares);
  // Forgets all operations in flight: the group is being destroyed.
  void close();
  bool ofThisProcess() const { return process_.isThis(); }
  c10::DeviceType type() const { return type_; }
  // Returns whether the backend sends nothing: operations end with their calls.
  bool fake() const { return group_.backend == "fake"; }
  // Sets whether the backend reports completions, see completed(). Call before the first operation.
  void setTold(bool told) { tells_ = told; }

  void setTimeout(Milliseconds timeout) { timeoutMs_.store(timeout.count()); }

  // Functions in the order of an operation's life.
  //
  // Numbers and records an operation that the calling thread is about to issue. `stack`: Python's
  // stack.
  std::shared_ptr<WatchedOp> begin(Operation op, const latest::PreHookArgs& args, Stack stack);
  // Records that the operation's call has returned. A null `work` ends the operation, unless it is
  // in a stream of the device. `device`: the operation's device.
  void leave(
      const std::shared_ptr<WatchedOp>& op, c10::intrusive_ptr<c10d::Work> work,
      c10::Device device);
  // Records that the thread that has waited for the operation goes on at this time.
  void pass(std::shared_ptr<WatchedOp> op, Clock::time_point now);
  // Forgets an operation whose call has raised. This and the next two have an effect once.
  void discard(WatchedOp& op);
  // Does the same for an operation whose error ends the program, and makes the process say why.
  void fail(WatchedOp& op);
  // Ends the operation whose completion a backend reports.
  void completed(const latest::CompletionHookArgs& args);
  // Ends an operation that has ended now. `duration`: from start to end, or 0 if the backend does
  // not report it.
  void end(WatchedOp& op, bool completed, Clock::duration duration = {});
  // Ends an operation whose end was found by polling its Work.
  void endAsked(WatchedOp& op, const WatchedOp::End& how, Clock::time_point now = Clock::now());

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const Group& group() const override { return group_; }
  std::vector<int64_t> globalRanks() const override;
  uint64_t key() const override { return key_; }
  LatenessClient& lateness() { return lateness_; }
  const LatenessClient& lateness() const override { return lateness_; }
  const InFlightOps& inFlight() const override { return inFlight_; }
  const IssueCounts& issued() const override { return issued_; }
  bool queues() const override { return type_ != c10::DeviceType::CPU; }
  Waiter waiterFor(const InFlight& entry) const override;
  // A queued collective first waits for the one before it, and a message for a thread.
  std::optional<Clock::time_point> begun(
      const InFlightOps::List& ops, const InFlight& entry) const override;
  bool closed() const override { return closed_.load(std::memory_order_acquire); }

  void leave(const std::string& how) noexcept override;
  std::string parting() const override {
    const auto diagnosis = diagnosis_.load();
    return diagnosis ? diagnosis->standingVerdict().parting : "";
  }

  void check(Clock::time_point now) noexcept REQUIRES(monitorThread) override;
  void abortInFlight(const char*) noexcept override {}
  std::string failureMessage() const override { return ""; }
  bool hasFailed() noexcept override;

 private:
  void record(WatchedOp& op, const latest::PreHookArgs& args);
  // Ends an operation. `lasted`: lower limit of the time since its issue.
  void finish(
      WatchedOp& op, bool completed, Clock::duration duration, Clock::duration lasted,
      Clock::time_point now);
  EventPoller& watchOn(c10::Device device);
  void endCall(WatchedOp& op) REQUIRES(mutex_);
  void askLater(const std::shared_ptr<WatchedOp>& op, c10::Device device);
  void askWaiting();
  // Returns the operations in flight for which `chosen` is true.
  std::vector<std::shared_ptr<WatchedOp>> operations(auto chosen) const;
  // Forgets operations whose calls have raised, which no hook reports: asks Python now and then
  // about calls that have not returned, and about all of them if `wanted`. Returns false while
  // Python is being asked.
  bool forgetRaised(Clock::time_point now, bool wanted) REQUIRES(monitorThread);
  // Once, makes the process write its latest operations, and say why an operation of the group has
  // ended with an error, as far as other ranks are the reason.
  void tellFailure(const Operation& op) noexcept;
  void explainFailure(const c10::intrusive_ptr<c10d::Store>& store, const std::string& what) const;

  const Group group_;
  const int rank_;
  const int size_;
  const c10::DeviceType type_;
  bool tells_ = false;
  const OwnProcess process_;
  const uint64_t key_;
  std::atomic<int64_t> timeoutMs_;
  std::atomic<bool> closed_{false};
  IssueCounts issued_;
  LatenessClient lateness_;
  InFlightOps inFlight_;
  RecordedOp::Recorders recorders_;
  std::atomic<Clock::rep> lastEnd_{0};  // a queued collective first waits for the one before it
  // null for a group of one rank
  AtomicShared<HangDiagnosis> diagnosis_;
  AtomicShared<status::Hosts> hosts_;
  AtomicShared<const StatusPart> status_;

  std::atomic<bool> asking_{false};  // the device's thread polls operations that threads wait for

  mutable Mutex mutex_;
  // The group's part; null if closed or not opened.
  c10::intrusive_ptr<c10d::Store> store_ GUARDED_BY(mutex_);
  // Operations whose completion the backend reports. `early_`: the keys of completions that it
  // reported before the call returned.
  std::unordered_map<uint64_t, std::shared_ptr<WatchedOp>> told_ GUARDED_BY(mutex_);
  std::unordered_set<uint64_t> early_ GUARDED_BY(mutex_);
  int calls_ GUARDED_BY(mutex_) = 0;  // number of their calls that have not returned
  // Valid once tellFailure() has been called.
  std::shared_future<void> failureTold_ GUARDED_BY(mutex_);
  // Joined devices.
  std::vector<std::pair<c10::Device, EventPoller*>> devices_ GUARDED_BY(mutex_);

  StandingVerdicts verdicts_{*this};
  // Since when forgetRaised() is wanted; nullopt if it is not.
  std::optional<Clock::time_point> wantedAt_ GUARDED_BY(monitorThread);
};

}  // namespace torchcomms_pg
