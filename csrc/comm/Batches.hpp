// Operations that a thread collects, to launch them together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "comm/Work.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

class Communicator;

// The batches of operations, at most one for each thread. Thread-safe.
class Batches {
 public:
  explicit Batches(Communicator& comm) : comm_(comm) {}

  // Makes add() take the calling thread's operations from now on. `parts`, `inputs`: the kind and
  // the tensors that a profile shows, where they are known.
  void start(OpKind parts = OpKind::coalesced, std::vector<at::Tensor> inputs = {});
  // Does the same for a block of code, inside which another may start: returns the Work of the
  // batch that a block around it has started, which goes on then. Null: this has started one.
  WorkPtr enter();
  // Launches the collected operations, those that streams order inside one group of the library.
  // Null: there are none.
  WorkPtr end();
  // Drops the calling thread's batch, without launching it.
  void drop();

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
    bool block = false;  // enter() has started it, and drop() or end() follows for certain
  };

  Batch* find();
  PreparedOp merge(std::vector<PreparedOp> calls) const;

  Communicator& comm_;
  std::mutex mutex_;
  std::atomic<int> open_{0};
  std::unordered_map<std::thread::id, Batch> batches_;
};

}  // namespace torchcomms_pg
