// The failure of a communicator: its cause, its text and its effects.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/CommError.hpp"
#include "nccl/NcclApi.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Communicator;
struct Verdict;

// Interval in which a waiting thread asks whether the handler of a signal wants it.
constexpr Milliseconds kInterruptInterval{200};

// The communicator's failure, which is set once and stands. Thread-safe.
class FailureState {
 public:
  // Cause of a failure. met: an operation of this rank meets it; requested: a call here, such as
  // abort(), wants it; elsewhere: it is on other ranks, while this one has no operation in flight.
  enum class Cause { met, requested, elsewhere };

  // Reason given where the handler of a signal ends what a thread waits for.
  static constexpr const char* kInterrupt = "an interrupt, such as Ctrl-C";

  explicit FailureState(Communicator& comm) : comm_(comm) {}

  std::shared_ptr<const Failure> get() const { return std::atomic_load(&failure_); }  // null: none
  c10d::ErrorType type() const;

  // Sets the failure, and tells hooks and recorders in a thread of its own. Returns the first
  // failure, which may be another.
  std::shared_ptr<const Failure> set(Failure failure, Cause cause = Cause::met);

  // Returns when the hooks that set() tells have run, or after 30 s; and when what is known of the
  // failure has been printed, or after 0.1 s.
  void awaitHooks() const;

  // Raises the failure as a CommError, or ends the process where it does that.
  [[noreturn]] void raise(const Failure& failure) const;
  // Returns whether a call has raised it, or an operation has ended with it.
  bool told() const { return told_.load(std::memory_order_relaxed); }

  // Sets whether a failure, other than a requested one, ends the process when the hooks have run;
  // after a failure elsewhere, with the next call. No call returns or raises in the meantime, and
  // on an accelerator the library is left alone, since streams that it lets go run on with data
  // that nobody has reduced.
  void setEndsProcess(bool endsProcess) {
    endsProcess_.store(endsProcess, std::memory_order_relaxed);
  }
  bool endsProcess() const { return endsProcess_.load(std::memory_order_relaxed); }

  // Builds a failure of `op`.
  Failure describe(c10d::ErrorType type, const Operation& op, const std::string& what) const;

  // Returns the error of `op`, for which the library has returned `result`. Sets the failure,
  // unless the error is of this call only.
  std::exception_ptr error(const Operation& op, ncclResult_t result);
  // Returns the error of `op` where the library has failed by now; null: it has not.
  std::exception_ptr asyncError(const Operation& op);

  // Words the communicator's failure for `op`, which it has ended: another operation of this rank,
  // maybe of another thread, may have met it.
  Failure endOf(const Operation& op, Failure failure) const;

  // Builds the failure of other ranks, while this one has been in no operation.
  Failure elsewhere() const;

  // Fails `op`, which has not ended in time, and the library on all ranks.
  void timeOut(const Operation& op, Milliseconds timeout, const Verdict& verdict);

  // Does the same to `op`, which waits for ranks that have died; `pids`: their processes.
  void lose(const Operation& op, const std::vector<int>& ranks, const std::vector<int>& pids);

  // Fails every operation here and on the other ranks, now and later. Has an effect once.
  void failBy(const std::string& why);
  // Does the same as failBy(), and returns when the hooks have run, or after 30 s.
  void abort(const std::string& why);
  // Does the same as failBy(), where something is in flight.
  void giveUp(const char* why) noexcept;
  // Fails what is in flight when the communicator is shrunk; not the library, which does so itself.
  void shrink();

  // Makes the library fail on all ranks.
  void failLibrary(const Failure& failure);

  // Fails the communicator where the handler of a signal wants the calling thread, and returns what
  // the handler has raised. Null: none wants it.
  std::exception_ptr interruption();

 private:
  // Ends the process where `failure` does so with the next call, or with one in flight; where
  // another thread is about to, does not return.
  void meet(const Failure& failure) const;
  std::string rankNames(const std::vector<int>& ranks) const;
  // Returns what a failure means for graphs with operations of the group; empty: there are none, or
  // the library's operations end in replays, too.
  std::string ofGraphs() const;

  Communicator& comm_;
  std::shared_ptr<const Failure> failure_;  // accessed by std::atomic_load
  std::atomic<bool> endsProcess_{false};
  std::atomic<bool> ending_{false};  // a thread ends the process when hooks have run
  mutable std::atomic<bool> told_{false};
  mutable std::mutex mutex_;
  std::shared_future<void> hooksDone_;
};

}  // namespace torchcomms_pg
