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

// The batches of operations, at most one for each thread. c10d's start and end of coalescing, which
// an exception may leave open, are start() and end(); a scope, which always ends, is enter() and
// leave() or cancel(). Scopes nest, inside each other and inside c10d's; so does c10d's in a scope.
// The outermost launches all. A batch that its thread has left open when it ended is dropped, and a
// warning tells so. Thread-safe.
class Batches {
 public:
  explicit Batches(Communicator& comm) : comm_(comm) {}

  // Makes add() take the calling thread's operations from now on. `parts`, `inputs`: the kind and
  // the tensors that a profile shows, where they are known.
  void start(OpKind parts = OpKind::coalesced, std::vector<at::Tensor> inputs = {});
  // Launches the collected operations, those that streams order inside one group of the library.
  // Null: there are none, or the scope around them will launch them.
  WorkPtr end();

  // Does the same as start(). Returns the number of operations in the batch that it joins; none:
  // there was no batch.
  std::optional<size_t> enter();
  // Does the same as end(), in a scope that enter() has begun with the result `joined`. Returns the
  // Work of the batch that it has joined.
  WorkPtr leave(std::optional<size_t> joined);
  // Ends such a scope without its operations.
  void cancel(std::optional<size_t> joined);

  // Drops the calling thread's batch, without launching it.
  void drop();
  // Drops the batches of threads that have ended.
  void dropEnded();

  // Returns whether any thread has a batch open. An operation outside of batches pays for nothing
  // else.
  bool any() const { return open_.load(std::memory_order_relaxed) > 0; }
  // Returns whether the calling thread has one open.
  bool open() { return any() && find() != nullptr; }

  // Adds the operation to the calling thread's batch and returns the batch's Work. Null: none is
  // open.
  WorkPtr add(PreparedOp& call);

 private:
  struct Batch {
    std::vector<PreparedOp> calls;
    WorkPtr work;
    bool scoped = false;  // opened by enter()
    pid_t thread = 0;     // the kernel's number of the thread
  };

  Batch* find();
  Batch& required();
  void open(OpKind parts, std::vector<at::Tensor> inputs, bool scoped);
  WorkPtr launch();
  PreparedOp merge(std::vector<PreparedOp> calls) const;

  Communicator& comm_;
  std::mutex mutex_;
  std::atomic<int> open_{0};
  ByThread<Batch> batches_;
};

}  // namespace torchcomms_pg
