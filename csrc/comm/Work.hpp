// One issued operation, as its caller sees it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ScopeExit.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/Thread.hpp"
#include "comm/Observer.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Communicator;
class Flight;

// Keeps the operation's outputs alive, and its inputs until it has finished. On an accelerator the
// Flight keeps the inputs. The Communicator makes and finishes the Work; any thread may call the
// other methods.
class Work final : public latest::Work {
 public:
  Work(
      std::shared_ptr<Communicator> comm, int rank, Operation op, std::vector<at::Tensor> inputs,
      std::vector<at::Tensor> outputs);

  bool isCompleted() override;

  // Returns whether the operation has finished without an error.
  bool isSuccess() const override;

  // Returns the rank that a message came from.
  int sourceRank() const override;

  std::vector<at::Tensor> result() override { return get(outputs_); }

  void synchronize() override { wait(kNoTimeout); }

  // Waits until the operation has finished, and raises its error, if any. If the timeout passes
  // first, the communicator fails, since an operation that runs cannot be withdrawn. On an
  // accelerator the current stream waits; the host waits only with a timeout, for a barrier, or
  // after Executor::setBlockingWait(true).
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  // Does the same as wait(), but the calling thread waits, even on an accelerator.
  void waitOnHost(std::chrono::milliseconds timeout) { wait(timeout, /*onHost=*/true); }

  void blockCurrentStream() override;

  // Aborts the whole communicator.
  void abort() override;

  // Returns the future of the outputs, or of the error. On an accelerator the future completes at
  // once, and work that its callbacks queue in their streams runs after the operation.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // Returns a future that completes with a c10d::WorkResult, never with an error.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

  // Returns the milliseconds from start to end. Raises before the end, and unless timing was
  // enabled before the operation.
  float getDuration() const override;

  uint64_t getSequencenumber() const override { return operation().seq; }

  std::chrono::milliseconds getTimeout() const override { return operation().timeout; }

  // Returns the operation. It never changes, except once for a batch, at its launch.
  const Operation& operation() const { return *op_.load(std::memory_order_acquire); }

  // Describes the operation, e.g. "all_reduce #2 (1 x Float, SUM) of group 'default_pg' on rank 0".
  std::string text() const;

  // Functions for the communicator. finish() has an effect once; completeFutures() runs the
  // callbacks of the futures, which may take time and locks.
  void setStarted(Clock::time_point at) {
    std::lock_guard lock(mutex_);
    started_ = at;
  }
  void setSource(int rank) {
    std::lock_guard lock(mutex_);
    source_ = rank;
  }
  int source() const { return get(source_); }  // -1 if unknown
  void setTimed(bool timed) { timed_ = timed; }
  bool timed() const { return timed_; }
  // Sets whom finish() notifies, or null. Call before the operation is launched.
  void setObserver(std::shared_ptr<EndObserver> observer) { observer_ = std::move(observer); }
  // Sets the operation of a batch, at the batch's launch.
  void assign(Operation op, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs);
  // Records that the operation is in a stream of an accelerator, or in a graph.
  void depart(std::shared_ptr<Flight> flight);
  // Returns null until depart().
  std::shared_ptr<Flight> flight() const { return get(flight_); }
  // Returns the time since the operation started, or 0 if that is unknown.
  Clock::duration elapsed() const;
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Waits for the end. Returns false if `deadline` passes first.
  bool waitUntil(std::optional<Clock::time_point> deadline);
  bool finish(std::exception_ptr error);
  void completeFutures();
  bool hasFuture() const;
  bool launched() const { return operation().seq != 0; }
  // Returns a host thread that waits for the operation now, by threadNumber(), or 0.
  uint64_t waiter() const {
    return waiting_.load(std::memory_order_relaxed) == 0 ? 0
                                                         : waiter_.load(std::memory_order_relaxed);
  }
  // Counts the calling thread among the waiting threads while the result exists.
  [[nodiscard]] auto waiting() {
    waiter_.store(threadNumber(), std::memory_order_relaxed);
    waiting_.fetch_add(1);
    return c10::make_scope_exit([this] { waiting_.fetch_sub(1); });
  }
  Clock::time_point started() const { return get(started_); }
  Clock::time_point finished() const { return get(finished_); }

  // Drops what only users need. Called when the last strong reference is gone; a Flight may still
  // hold a weak reference.
  void release_resources() override;

 private:
  template <class Field>
  Field get(const Field& field) const {
    std::lock_guard lock(mutex_);
    return field;
  }
  void wait(std::chrono::milliseconds timeout, bool onHost);
  // Ends the operation's range in a profile. Call with the lock held.
  void endRange();

  const std::shared_ptr<Communicator> comm_;
  const Operation made_;
  std::optional<Operation> assigned_;  // written once, before `op_` points to it
  std::atomic<const Operation*> op_{&made_};
  std::atomic<bool> done_{false};
  std::atomic<int> waiting_{0};
  std::atomic<uint64_t> waiter_{0};  // the latest of the waiting threads
  bool timed_ = false;
  std::shared_ptr<EndObserver> observer_;
  int source_ = -1;
  Clock::time_point started_{};
  Clock::time_point finished_{};
  std::shared_ptr<Flight> flight_;
  std::vector<at::Tensor> inputs_;   // released at finish() or depart()
  std::vector<at::Tensor> outputs_;  // value of result() and of the future
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> futureResult_;
  bool futureAnnounced_ = false;
  bool futureResultAnnounced_ = false;
};

using WorkPtr = c10::intrusive_ptr<Work>;

}  // namespace torchcomms_pg
