// The failure of a communicator: its cause, its text and its effects.
#pragma once

#include <nccl.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/AtomicShared.hpp"
#include "comm/CommError.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Communicator;
struct Verdict;

// Interval at which a waiting thread checks for pending signal handlers.
constexpr Milliseconds kInterruptInterval{200};

// The communicator's failure. The first one is kept. Thread-safe.
class FailureState {
 public:
  // Cause of a failure. met: an operation of this rank found it. requested: a call on this rank,
  // such as abort(), asked for it. elsewhere: other ranks found it while this rank had no operation
  // in flight.
  enum class Cause { met, requested, elsewhere };

  // Reason of a failure by which the handler of a signal ends a wait.
  static constexpr const char* kInterrupt = "an interrupt, such as Ctrl-C";

  explicit FailureState(Communicator& comm) : comm_(comm) {}

  // null if none
  std::shared_ptr<const Failure> get() const { return failure_.load(); }
  c10d::ErrorType type() const;

  // Sets the failure, and runs hooks and recorders in a separate thread. Returns the communicator's
  // first failure, which may be another.
  std::shared_ptr<const Failure> set(Failure failure, Cause cause = Cause::met);

  // Waits until the hooks that set() has started have run, for at most 30 s; then until what is
  // known of the failure has been printed, for at most 0.1 s.
  void awaitHooks() const;

  // Raises the failure as a CommError, or ends the process, see setEndsProcess().
  [[noreturn]] void raise(const Failure& failure) const;
  // Returns whether a call has raised the failure, or an operation has ended with it.
  bool told() const { return told_.load(std::memory_order_relaxed); }

  // Sets whether a failure ends the process when the hooks have run, unless it was requested. After
  // a failure elsewhere, the next call ends the process. No call returns or raises in the meantime.
  // On an accelerator the library is not aborted, since its streams would then go on with data that
  // was not reduced.
  void setEndsProcess(bool endsProcess) {
    endsProcess_.store(endsProcess, std::memory_order_relaxed);
  }
  bool endsProcess() const { return endsProcess_.load(std::memory_order_relaxed); }

  // Builds a failure of `op`.
  Failure describe(c10d::ErrorType type, const Operation& op, const std::string& what) const;

  // Returns the error of `op`, for which the library has returned `result`. Sets the failure,
  // unless the error is of this call only.
  std::exception_ptr error(const Operation& op, ncclResult_t result);
  // Returns the error of `op`, or null if the library has not failed by now.
  std::exception_ptr asyncError(const Operation& op);

  // Returns `failure`, the communicator's, worded for `op`, which has ended with it. Another
  // operation of this rank, possibly of another thread, may have found the failure.
  Failure endOf(const Operation& op, Failure failure) const;

  // Builds a failure of other ranks that happened while this one was in no operation.
  Failure elsewhere() const;

  // Fails `op`, which has not ended in time, and the library on all ranks.
  void timeOut(const Operation& op, Milliseconds timeout, const Verdict& verdict);

  // Fails `op`, which waits for `ranks`, whose processes `pids` have died, and the library on all
  // ranks.
  void lose(const Operation& op, const std::vector<int>& ranks, const std::vector<int>& pids);

  // Fails every operation on all ranks, now and later. Has an effect once.
  void failBy(const std::string& why);
  // Does the same as failBy(), then waits for the hooks, for at most 30 s.
  void abort(const std::string& why);
  // Does the same as failBy(), if an operation is in flight.
  void abortInFlight(const char* why) noexcept;
  // Fails the operations in flight when the communicator is shrunk. Does not fail the library,
  // which ends them itself.
  void shrink();

  // Makes the library fail on all ranks.
  void failLibrary(const Failure& failure);

  // If the calling thread has a pending signal handler, fails the communicator and returns what the
  // handler raised. Returns null otherwise.
  std::exception_ptr interruption();

 private:
  // Ends the process if `failure` does so with the next call or with an operation in flight. Does
  // not return while another thread is about to end the process.
  void meet(const Failure& failure) const;
  std::string rankNames(const std::vector<int>& ranks) const;
  // Returns what a failure means for graphs with operations of the group. Empty if no graph has
  // any, or if the library's operations end in replays, too.
  std::string ofGraphs() const;

  Communicator& comm_;
  AtomicShared<const Failure> failure_;
  std::atomic<bool> endsProcess_{false};
  std::atomic<bool> ending_{false};  // a thread will end the process when hooks have run
  mutable std::atomic<bool> told_{false};
  mutable std::mutex mutex_;
  std::shared_future<void> hooksDone_;
};

}  // namespace torchcomms_pg
