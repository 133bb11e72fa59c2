// The failure of a communicator: its cause, its text and its effects.
#pragma once

#include <nccl.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "base/AtomicShared.hpp"
#include "base/Mutex.hpp"
#include "operation/CommError.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class CommHandle;
class DeferredOps;
class GroupHooks;
class Identity;
class InFlightOps;
class Observer;
class RecorderSet;
struct Explanation;

// Interval at which a waiting thread runs the pending handlers of signals.
constexpr Milliseconds kInterruptInterval{200};

// Keeps the communicator's first failure. Thread-safe.
class FailureState {
 public:
  // Cause of a failure. met: an operation of this rank found it. requested: a call on this rank,
  // such as abort(), asked for it. elsewhere: other ranks found it while this rank had no operation
  // in flight.
  enum class Cause { met, requested, elsewhere };

  // Reason of the failure that ends a wait when a signal's handler has raised.
  static constexpr const char* kInterrupt = "an interrupt, such as Ctrl-C";

  // `failure`: where to keep the failure, see get().
  FailureState(
      const Identity& self, AtomicShared<const Failure>& failure, CommHandle& library,
      InFlightOps& inFlight, GroupHooks& hooks, RecorderSet& recorders, DeferredOps& deferred,
      Observer& observer)
      : self_(self),
        failure_(failure),
        library_(library),
        inFlight_(inFlight),
        hooks_(hooks),
        recorders_(recorders),
        deferred_(deferred),
        observer_(observer) {}

  // Returns the failure, or null before the first.
  std::shared_ptr<const Failure> get() const { return failure_.load(); }

  // Sets the failure unless an earlier one is set, and then has a separate thread write the flight
  // recorder and call abort hooks. Returns the first failure.
  std::shared_ptr<const Failure> set(Failure failure, Cause cause = Cause::met);

  // Waits until the abort hooks that set() has started have run, for at most 30 s; then until
  // pending output is printed, for at most 0.1 s. In a thread that runs abort hooks, returns at
  // once.
  void awaitHooks() const;

  // Raises the failure as a CommError, or ends the process, see setEndsProcess().
  [[noreturn]] void raise(const Failure& failure) const;
  // Returns whether a call has raised the failure, or an operation has ended with it.
  bool told() const { return told_.load(std::memory_order_relaxed); }

  // Sets whether a failure ends the process, unless a call requested the failure (see Cause). A
  // failure that this rank met ends the process when the hooks have run; until then, calls that
  // meet the failure block. A failure found elsewhere ends it in this rank's next call. On an
  // accelerator the library is not aborted, since its streams would then go on with data that was
  // not reduced.
  void setEndsProcess(bool endsProcess) {
    endsProcess_.store(endsProcess, std::memory_order_relaxed);
  }
  bool endsProcess() const { return endsProcess_.load(std::memory_order_relaxed); }

  // Builds a failure of `op`.
  Failure describe(c10d::ErrorType type, const Operation& op, const std::string& what) const;

  // Returns the error of `op`, for which the library has returned `result`. Sets the failure,
  // unless the library reports that only this call has failed.
  std::exception_ptr error(const Operation& op, ncclResult_t result);
  // Returns the error of `op`, or null if neither the communicator nor the library has failed.
  std::exception_ptr asyncError(const Operation& op);

  // Returns the communicator's `failure`, worded for `op`, which has ended with it. Another
  // operation, possibly of another thread, may have found the failure.
  Failure endOf(const Operation& op, Failure failure) const;

  // Builds the failure for an error of other ranks while this rank was in no operation.
  Failure elsewhere() const;

  // Fails `op`, which has not ended within `timeout`, and the library.
  void timeOut(const Operation& op, Milliseconds timeout, const Explanation& found);

  // Fails `op` and the library: `op` waits for `ranks`, and their processes `pids` have died.
  void lose(const Operation& op, const std::vector<int>& ranks, const std::vector<int>& pids);

  // Fails all present and later operations, and the library, for the reason `why`. Has an effect
  // once.
  void failBy(const std::string& why);
  // Does the same as failBy(), then waits for the hooks, for at most 30 s.
  void abort(const std::string& why);
  // Does the same as failBy(), if an operation is in flight.
  void abortInFlight(const char* why) noexcept;
  // Sets the failure if operations are in flight when the communicator is shrunk. Does not fail the
  // library, which ends these operations itself.
  void shrink();

  // Makes the library fail, see CommHandle::fail() and setEndsProcess().
  void failLibrary(const Failure& failure);

  // Calls `body`, which sets a failure and makes the library fail. If an exception comes between
  // the two, such as one for lack of memory, has the monitor call failLibraryIfDue(): otherwise
  // blocked threads would stay so.
  template <class Body>
  void failBoth(const Body& body) {
    try {
      body();
    } catch (...) {
      libraryIsDue_ = true;
      throw;
    }
  }
  void failLibraryIfDue(const Failure& failure) {
    if (libraryIsDue_) {
      failLibrary(failure);
      libraryIsDue_ = false;
    }
  }

  // Runs the pending handlers of signals if the calling thread may. If one raises, fails the
  // communicator and returns the handler's exception; otherwise returns null.
  std::exception_ptr interruption();

 private:
  // Ends the process, after the hooks, if `failure` makes this rank's next call do so, or if
  // another thread is about to end the process. Otherwise, and in a thread that runs abort hooks,
  // returns.
  void meet(const Failure& failure) const;
  // Returns the part of a failure's message about graphs that hold operations of the group. Empty
  // if no graph holds any, or if the library ends operations in replays, too.
  std::string ofGraphs() const;

  const Identity& self_;
  AtomicShared<const Failure>& failure_;
  CommHandle& library_;
  InFlightOps& inFlight_;
  GroupHooks& hooks_;
  RecorderSet& recorders_;
  DeferredOps& deferred_;
  Observer& observer_;
  std::atomic<bool> endsProcess_{false};
  std::atomic<bool> ending_{false};  // a thread will end the process when hooks have run
  std::atomic<bool> libraryIsDue_{false};
  mutable std::atomic<bool> told_{false};
  mutable Mutex mutex_;
  std::shared_future<void> hooksDone_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg
