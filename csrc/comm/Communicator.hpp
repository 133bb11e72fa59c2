// A group of ranks that communicate through one library, and the one path that every operation of
// every front end takes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/Batches.hpp"
#include "comm/DeferredOps.hpp"
#include "comm/Executor.hpp"
#include "comm/FailureState.hpp"
#include "comm/GroupHooks.hpp"
#include "comm/Identity.hpp"
#include "comm/InFlightOps.hpp"
#include "comm/Joining.hpp"
#include "comm/Observer.hpp"
#include "comm/RecorderSet.hpp"
#include "comm/Relaxations.hpp"
#include "comm/SignalSlots.hpp"
#include "comm/Watchdog.hpp"
#include "comm/Work.hpp"
#include "handle/CommHandle.hpp"
#include "hooks/Hooks.hpp"
#include "monitor/Monitor.hpp"
#include "nccl/Config.hpp"
#include "nccl/Library.hpp"
#include "operation/IssueCounts.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

// A communicator, as one rank holds it. Collectives.hpp and Window.hpp prepare operations and pass
// them to issue() or launch(). backend/Memory.cpp has operations without a stream. On CPU
// tensors, a call with `async` false returns when the operation has ended; with `async` true it
// returns a Work. On an accelerator every call returns when its operation is queued: with `async`
// false in the caller's current stream, else in the communicator's. A call that makes no Work
// returns null.
//
// The parts keep the state, each with its own lock. Thread-safe.
class Communicator final : public Identity, public Launcher, public Monitor::Watched {
 public:
  // Options of one operation.
  struct Options {
    bool async = true;
    std::optional<Milliseconds> timeout;  // the communicator's by default
  };

  // Takes over `made`, which was made with `config`. Construct with Monitor::watch().
  Communicator(
      const Library& api, CommHandle::Made made, int rank, int size, Group group,
      Milliseconds timeout, Place place, NcclConfig config = {});
  ~Communicator() override;

  std::shared_ptr<Communicator> self() {
    return std::static_pointer_cast<Communicator>(shared_from_this());
  }
  // Returns whether the tensors of a list are communicated one by one and in place, rather than
  // through one buffer for all. Memory of an accelerator is scarce; in host memory an operation for
  // each rank costs more than copies. The result is the same on all ranks, whatever their tensors.
  bool listsOneByOne() const { return queues(); }
  // Sets the description, which torch assigns after it has created the backend. Call before the
  // first operation.
  void setDescription(std::string description);
  // Returns whether this communicator was made in this process, rather than in the parent before a
  // fork.
  bool ofThisProcess() const { return library_.process().isThis(); }

  // Timeouts.
  void setTimeout(Milliseconds timeout) {
    timeoutMs_.store(timeout.count(), std::memory_order_relaxed);
  }
  Milliseconds timeout() const { return Milliseconds(timeoutMs_.load(std::memory_order_relaxed)); }

  // Issue, in the order of an operation's life.
  PreparedOp prepare(OpKind kind, const Options& options) const;
  // Launches the operation, or adds it to the batch of the calling thread.
  C10_ALWAYS_INLINE WorkPtr issue(PreparedOp call) {
    if (C10_UNLIKELY(batches_.any())) {
      if (auto work = batches_.add(call)) {
        return work;
      }
    }
    return launch(std::move(call));
  }
  WorkPtr launch(PreparedOp call, WorkPtr work = nullptr) override;
  // Does the same as launch(), without hooks and checks.
  WorkPtr start(PreparedOp& call, WorkPtr work);
  // Waits for the end of `work`, see Work::wait. `onHost`: the calling thread waits, even on an
  // accelerator.
  void await(Work& work, Milliseconds timeout, bool onHost = false);
  WorkPtr newWork(const PreparedOp& call) override;
  // Makes the Work of an operation that has finished.
  WorkPtr finishedWork(
      OpKind kind, std::vector<at::Tensor> outputs, std::optional<uint64_t> seq = std::nullopt);
  // Waits until nothing is in flight, see Executor::drain.
  void drain();

  // Returns the number of collectives issued so far.
  uint64_t sequenceNumber() const { return issued_.collectives(); }

  // Gives every operation from now on, even a synchronous one, a Work that knows its duration.
  void enableTiming() { timing_.store(true, std::memory_order_relaxed); }
  bool timed() const { return timing_.load(std::memory_order_relaxed); }

  // Makes and returns a communicator of the listed ranks, in the order of the list; returns null
  // for an empty list. Collective over all ranks, even those with a wrong list. A rank with a wrong
  // list raises ValueError, and so do the ranks whose lists contain that rank. `config`: this
  // communicator's by default. `named`: whether NCCL gets the group's name.
  std::shared_ptr<Communicator> split(
      const std::vector<int>& ranks, Group group, Milliseconds timeout,
      const std::optional<NcclConfig>& config = std::nullopt, bool named = false);
  // Returns the number of splits so far, without those that a hook has cancelled. The same on every
  // rank.
  uint64_t splits() const { return splits_; }
  // Makes and returns a communicator without the excluded ranks, with this communicator's
  // configuration. The excluded ranks do not call shrink(), and may be dead. With `abort`,
  // operations in flight fail first.
  std::shared_ptr<Communicator> shrink(
      const std::vector<int>& excluded, bool abort, Group group, Milliseconds timeout);

  // Takes over the users' hooks and recorders of `former`, which this communicator replaces. Call
  // before the first operation.
  void inheritFrom(const Communicator& former);
  // Closes a communicator that has a successor: operations in flight fail. Unlike close(), calls no
  // hooks of finalize and clears no hooks, since the successor has them.
  void retire(const char* why);

  // Waits for operations in flight, then frees the library's communicator. Idempotent; later
  // operations raise. Raises CommError, once all is freed, if the ranks' last operations do not
  // match and no error has reported that. If the handler of a signal calls close() in the middle of
  // a call in the communicator, close() fails that call. The communicator is then freed when the
  // thread leaves that call.
  void close();
  bool closed() const { return library_.closed(); }

  // The parts.
  CommHandle& library() { return library_; }
  const Library& api() const { return library_.api(); }
  Joining& joining() { return joining_; }
  Executor& executor() const { return *executor_; }
  DeferredOps& deferred() { return deferred_; }
  InFlightOps& inFlight() { return inFlight_; }
  FailureState& failureState() { return failureState_; }
  Batches& batches() { return batches_; }
  const std::shared_ptr<Hooks>& hooks() const { return groupHooks_.users(); }
  GroupHooks& groupHooks() { return groupHooks_; }
  RecorderSet& recorders() { return recorders_; }
  SignalSlots& signalSlots() { return signalSlots_; }
  Watchdog& watchdog() { return watchdog_; }
  Relaxations& relaxations() { return relaxations_; }
  Observer& observer() const { return *observer_; }

  void check(Clock::time_point now) noexcept REQUIRES(monitorThread) override {
    watchdog_.check(now);
  }
  void abortInFlight(const char* why) noexcept override { failureState_.abortInFlight(why); }
  std::string failureMessage() const override;

 private:
  std::unique_ptr<Executor> makeExecutor();
  // Does the same as start(), between the operation's pre and post hooks.
  WorkPtr startHooked(PreparedOp& call, WorkPtr work);
  void closeNow();
  void end();

  const NcclConfig config_;
  std::atomic<int64_t> timeoutMs_;
  std::atomic<bool> timing_{false};
  IssueCounts issued_;
  std::atomic<uint64_t> splits_{0};
  CommHandle library_;
  InFlightOps inFlight_;
  Relaxations relaxations_;
  AtomicShared<const Failure> failure_;
  const std::unique_ptr<Observer> observer_;
  GroupHooks groupHooks_;
  RecorderSet recorders_{*this, library_};
  DeferredOps deferred_{library_};
  FailureState failureState_{*this,       failure_,   library_,  inFlight_,
                             groupHooks_, recorders_, deferred_, *observer_};
  Watchdog watchdog_{*this, library_, inFlight_, deferred_, failureState_, *observer_};
  Joining joining_{*this, library_, inFlight_, failureState_};
  const std::unique_ptr<Executor> executor_;
  Batches batches_{*this, library_.api(), *this};
  SignalSlots signalSlots_;
};

}  // namespace torchcomms_pg
