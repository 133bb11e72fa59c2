// Operations that are executed together: those that one thread issued in one group, or a single
// one.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// The operations of one communicator. Built and launched by the issuing
// thread, executed by one thread.
class Plan {
 public:
  explicit Plan(std::shared_ptr<Comm> comm) : comm_(std::move(comm)) {}

  const Comm& comm() const { return *comm_; }
  const std::vector<cudaStream_t>& streams() const { return streams_; }
  void addStream(cudaStream_t stream);
  void add(const Collective& collective) { collectives_.push_back(collective); }
  void add(std::shared_ptr<Transfer> transfer) { transfers_.push_back(std::move(transfer)); }
  void add(Put put) { puts_.push_back(std::move(put)); }
  void add(SignalWait wait) { waits_.push_back(std::move(wait)); }

  // Returns a copy with the same operations, of a plan that has not been launched.
  Plan again() const;

  // Fixes the plan's place in the order of the communicator's operations. `now`: no operation is
  // before it, so that peers may have what they need of it at once.
  void launch(bool now);

  // Runs the puts, which do not wait, then the transfers together, then the waits for signals and
  // the collectives in order; blocks. An error fails the communicator.
  ncclResult_t execute() noexcept;

 private:
  std::shared_ptr<Comm> comm_;
  std::vector<cudaStream_t> streams_;
  std::vector<std::shared_ptr<Transfer>> transfers_;
  std::vector<Put> puts_;
  std::vector<SignalWait> waits_;
  std::vector<Collective> collectives_;
  uint64_t ticket_ = 0;
  bool begun_ = false;
};

// Plans that have streams in common. Once all these streams have come to them, the plans are
// executed concurrently, because they may belong to ranks that wait for each other; no stream goes
// on before all plans are done.
class Launch : public std::enable_shared_from_this<Launch> {
 public:
  void add(Plan plan);
  void absorb(Launch& other);
  bool sharesStream(const Plan& plan) const;
  bool usesCaller() const;  // true with the null stream among them

  // Enqueues on the streams. With the null stream among them it blocks until
  // done and returns the result.
  ncclResult_t start();

 private:
  // Returns whether there is one stream only and it records a graph: then each replay launches the
  // plans.
  bool captured();
  ncclResult_t comeTo();
  ncclResult_t executeAll();
  bool anyFailed() const;

  std::vector<Plan> plans_;
  std::vector<cudaStream_t> streams_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  size_t awaited_ = 0;
  bool done_ = false;
  ncclResult_t result_ = ncclSuccess;
};

}  // namespace torchcomms_pg::shm
