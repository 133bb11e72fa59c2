// Operations that a thread collects, to launch them together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "base/ByThread.hpp"
#include "comm/Work.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

class Communicator;

// The batches of operations, at most one for each thread. start() and end() are c10d's coalescing,
// which an exception may leave open. enter() and leave() or cancel() bracket a scope, which always
// ends. Both may nest in a scope, and a scope in c10d's coalescing; the outermost of them launches
// all operations. If a thread ends with an open batch, the batch is dropped with a warning.
//
// On an accelerator a batch runs after what is queued in each stream in which its operations were
// issued, and these streams go on after it: torch may reuse the memory of the operations' tensors
// in the order of these streams. Thread-safe.
class Batches {
 public:
  explicit Batches(Communicator& comm) : comm_(comm) {}

  // Makes add() collect the calling thread's operations from now on. `parts`, `inputs`: the kind
  // and the tensors that a profile shows, if known.
  void start(OpKind parts = OpKind::coalesced, std::vector<at::Tensor> inputs = {});
  // Launches the collected operations; those that streams order run in one group of the library.
  // Returns null if no operation was collected, or if an enclosing scope will launch them.
  WorkPtr end();

  // Does the same as start(). Returns the number of operations in the batch that it joins, or
  // nullopt if no batch was open.
  std::optional<size_t> enter();
  // Does the same as end(), for a scope that enter() has begun with the result `joined`. Returns
  // the Work of the enclosing batch if it has joined one.
  WorkPtr leave(std::optional<size_t> joined);
  // Ends such a scope, and drops its operations.
  void cancel(std::optional<size_t> joined);

  // Checks the messages of this rank to itself in the batch that end() would launch, if it is on an
  // accelerator. Every launch does the same.
  void check();

  // Drops the calling thread's batch, without launching it.
  void drop();
  // Drops the batches of threads that have ended.
  void dropEnded();

  // Returns whether any thread has a batch open. Without batches, an operation costs no more than
  // this check.
  bool any() const { return open_.load(std::memory_order_relaxed) > 0; }
  // Returns whether the calling thread has a batch open.
  bool open() { return any() && find() != nullptr; }

  // Adds the operation to the calling thread's batch and returns the batch's Work. Returns null if
  // no batch is open.
  WorkPtr add(PreparedOp& call);

 private:
  struct Batch {
    std::vector<PreparedOp> calls;
    WorkPtr work;
    bool scoped = false;  // opened by enter()
    pid_t thread = 0;     // the thread's id in the kernel
  };

  Batch* find();
  Batch& required();
  void open(OpKind parts, std::vector<at::Tensor> inputs, bool scoped);
  WorkPtr launch();
  void check(const std::vector<PreparedOp>& calls) const;
  PreparedOp merge(std::vector<PreparedOp> calls) const;

  Communicator& comm_;
  std::mutex mutex_;
  std::atomic<int> open_{0};
  ByThread<Batch> batches_;
};

}  // namespace torchcomms_pg
