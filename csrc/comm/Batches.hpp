// Operations that a thread collects, to launch them together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "comm/PreparedOp.hpp"
#include "comm/Work.hpp"

namespace torchcomms_pg {

class Communicator;

// Thread-safe. Each thread has a batch of its own, or none.
class Batches {
 public:
  explicit Batches(Communicator& comm) : comm_(comm) {}

  // From now on add() takes the operations of the calling thread. `parts`, `inputs`: what a profile
  // is to show, where it is known.
  void start(OpKind parts = OpKind::coalesced, std::vector<at::Tensor> inputs = {});
  // Launches what was collected, inside one group of the library. Null: nothing.
  WorkPtr end();
  // Forgets it.
  void drop();

  // Whether any thread has a batch open: all that an operation outside of batches costs.
  bool any() const { return open_.load(std::memory_order_relaxed) > 0; }
  // Whether the calling thread has.
  bool open() { return any() && find() != nullptr; }

  // Adds the operation to the calling thread's batch, whose Work it returns. Null: none is open.
  WorkPtr add(PreparedOp& call);

 private:
  struct Batch {
    std::vector<PreparedOp> calls;
    WorkPtr work;
  };

  Batch* find();
  PreparedOp merge(std::vector<PreparedOp> calls) const;

  Communicator& comm_;
  std::mutex mutex_;
  std::atomic<int> open_{0};
  std::unordered_map<std::thread::id, Batch> batches_;
};

}  // namespace torchcomms_pg
