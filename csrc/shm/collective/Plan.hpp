// Operations that are executed together: all operations of one group, or a single operation.
#pragma once

#include <memory>
#include <vector>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// Operations of one communicator on one stream. The issuing thread builds and starts the plan, and
// one thread executes it.
class Plan : public std::enable_shared_from_this<Plan> {
 public:
  Plan(std::shared_ptr<Comm> comm, cudaStream_t stream) : comm_(std::move(comm)), stream_(stream) {}

  void add(const Collective& collective) { collectives_.push_back(collective); }
  void add(std::shared_ptr<Transfer> transfer) { transfers_.push_back(std::move(transfer)); }
  void add(Put put) { puts_.push_back(std::move(put)); }
  void add(SignalWait wait) { waits_.push_back(std::move(wait)); }

  // Enqueues the operations on the stream. If the stream records a graph, each replay executes
  // them. If the stream is null, executes them in the calling thread. Returns their result if they
  // have been executed, and else ncclSuccess.
  ncclResult_t start();

 private:
  // Returns a copy. This plan must not have been launched.
  std::shared_ptr<Plan> again() const;

  // Fixes the plan's place in the order of the communicator's operations. `now` is true if the
  // stream has no earlier operation: then a single small collective publishes this rank's data at
  // once.
  void launch(bool now);

  // Runs the puts, which do not wait, then the transfers together, then the waits for signals, then
  // the collectives in order. Blocks. Returns the result; an error fails the communicator.
  ncclResult_t execute() noexcept;

  std::shared_ptr<Comm> comm_;
  const cudaStream_t stream_;
  std::vector<std::shared_ptr<Transfer>> transfers_;
  std::vector<Put> puts_;
  std::vector<SignalWait> waits_;
  std::vector<Collective> collectives_;
  uint64_t ticket_ = 0;
  bool begun_ = false;
};

}  // namespace torchcomms_pg::shm
