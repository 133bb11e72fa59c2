// One issued operation, as its caller sees it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/Operation.hpp"

namespace torchcomms_pg {

class Communicator;
class Flight;

// Keeps the operation's tensors alive until it has finished; on an accelerator
// its Flight does, and this the outputs alone. Made and finished by its Communicator; the other
// methods may be called from any thread.
class Work final : public latest::Work {
 public:
  Work(
      std::shared_ptr<Communicator> comm,
      int rank,
      Operation op,
      std::vector<at::Tensor> inputs,
      std::vector<at::Tensor> outputs);

  bool isCompleted() override;

  // True once the operation has finished without an error.
  bool isSuccess() const override;

  // The rank a message came from.
  int sourceRank() const override;

  std::vector<at::Tensor> result() override;

  void synchronize() override;

  // Returns when the operation has finished, or raises what it failed with.
  // With a timeout: when it has not finished by then, the communicator fails,
  // since an operation under way cannot be taken back. On an accelerator the
  // current stream waits, and the host only where a timeout is given, or for a
  // barrier.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  // As wait(), and on an accelerator, too, the calling thread waits.
  void waitOnHost(std::chrono::milliseconds timeout);

  void blockCurrentStream() override;

  // Aborts the whole communicator.
  void abort() override;

  // Completes with the outputs, or with the error. On an accelerator at once,
  // and what its callbacks do comes after the operation in their streams.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // Completes with a c10d::WorkResult, never with an error.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

  // Milliseconds from start to end; needs timing to be enabled before.
  float getDuration() const override;

  uint64_t getSequencenumber() const override;

  std::chrono::milliseconds getTimeout() const override;

  const Operation& operation() const { return op_; }

  // "all_reduce #2 (1 x Float, SUM) of group 'default_pg' on rank 0"
  std::string text() const;

  // For the communicator. `finish` has an effect once; `announce` runs the
  // callbacks of the futures, which may take time and locks.
  void setStarted(Clock::time_point at);
  void setSource(int rank);
  int source() const;  // -1: not known
  void setTimed(bool timed);
  // Of a batch: what it turned out to be, when it is launched.
  void assign(Operation op, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs);
  // Of an accelerator: the operation is in a stream, or in a graph.
  void depart(std::shared_ptr<Flight> flight);
  // Null: it has not departed.
  std::shared_ptr<Flight> flight() const;
  // Since it started; 0: not known.
  Clock::duration elapsed() const;
  bool done() const { return done_.load(std::memory_order_acquire); }
  // False when `deadline` passed first.
  bool waitUntil(std::optional<Clock::time_point> deadline);
  bool finish(std::exception_ptr error);
  void completeFutures();
  bool hasFuture() const;
  bool launched() const { return op_.seq != 0; }
  // Whether a thread waits for it now, on the host.
  bool awaited() const { return waiting_.load(std::memory_order_relaxed) != 0; }
  // Counts the calling thread among those, while it lives.
  class Waiting {
   public:
    explicit Waiting(Work& work) : work_(work) { work_.waiting_.fetch_add(1); }
    ~Waiting() { work_.waiting_.fetch_sub(1); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Work& work_;
  };
  Clock::time_point started() const;
  Clock::time_point finished() const;

  // Called when its users are gone, and only a Flight may still look for it.
  void release_resources() override;

 private:
  void wait(std::chrono::milliseconds timeout, bool onHost);
  // In a profile; under the lock.
  void endRange();

  const std::shared_ptr<Communicator> comm_;
  Operation op_;
  std::atomic<bool> done_{false};
  std::atomic<int> waiting_{0};
  bool timed_ = false;
  int source_ = -1;
  Clock::time_point started_{};
  Clock::time_point finished_{};
  std::shared_ptr<Flight> flight_;
  std::vector<at::Tensor> inputs_;   // released when finished, or departed
  std::vector<at::Tensor> outputs_;  // what result() and the future give
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> futureResult_;
  bool futureAnnounced_ = false;
  bool futureResultAnnounced_ = false;
};

using WorkPtr = c10::intrusive_ptr<Work>;

}  // namespace torchcomms_pg
