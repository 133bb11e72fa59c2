// Operations that a thread collects, to launch them together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <optional>
#include <vector>

#include "base/ByThread.hpp"
#include "base/Mutex.hpp"
#include "comm/Work.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

class Identity;
class Library;

// Makes the Works of operations, and launches operations.
class Launcher {
 public:
  virtual WorkPtr newWork(const PreparedOp& call) = 0;
  // Launches the operation, with hooks. Returns its Work or null. `work`: for a batch, the Work
  // that was made when the batch was opened.
  virtual WorkPtr launch(PreparedOp call, WorkPtr work = nullptr) = 0;

 protected:
  ~Launcher() = default;
};

// The batches of operations, at most one for each thread. start() and end() are c10d's coalescing,
// which an exception may leave open. enter() and leave() or cancel() are the begin and the end of a
// scope, which always ends. A scope may contain scopes and c10d's coalescing, and c10d's coalescing
// may contain scopes; the outermost of them launches all operations. If a thread ends with an open
// batch, the batch is dropped with a warning.
//
// On an accelerator a batch runs after all work queued so far in the streams in which its
// operations were issued. These streams then wait for the batch, since torch may reuse the memory
// of the operations' tensors in the order of these streams. Thread-safe.
class Batches {
 public:
  Batches(const Identity& self, const Library& api, Launcher& launcher)
      : self_(self), api_(api), launcher_(launcher) {}

  // Makes add() collect the calling thread's operations from now on. `parts`, `inputs`: the kind
  // and the tensors that a profile shows, if known.
  void start(OpKind parts = OpKind::coalesced, std::vector<at::Tensor> inputs = {});
  // Launches the collected operations and returns the batch's Work. Several operations run in one
  // group of the library, unless all are messages that no stream orders. Returns null if no
  // operation was collected, or if an enclosing scope will launch them.
  WorkPtr end();

  // Begins a scope. Returns the number of operations in the open batch, which the scope joins, or
  // nullopt if no batch was open.
  std::optional<size_t> enter();
  // Ends the scope for which enter() returned `joined`. If the scope joined a batch, returns the
  // batch's Work; otherwise launches the operations, as end() does.
  WorkPtr leave(std::optional<size_t> joined);
  // Ends the scope for which enter() returned `joined`, and drops the scope's operations.
  void cancel(std::optional<size_t> joined);

  // Raises ValueError if this rank's messages to itself do not match in the batch that end() would
  // launch. Does nothing on the CPU, where the library checks them. Every launch repeats the check.
  void check();

  // Drops the calling thread's batch, without launching it.
  void drop();
  // Drops the batches of threads that have ended.
  void dropEnded();

  // Returns whether any thread has a batch open. If none has, an operation pays only for this
  // check.
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

  const Identity& self_;
  const Library& api_;
  Launcher& launcher_;
  Mutex mutex_;
  std::atomic<int> open_{0};
  ByThread<Batch> batches_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg
