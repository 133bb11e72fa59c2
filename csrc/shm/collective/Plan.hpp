// What is executed together: the operations that one thread issued in one
// group, or a single one.
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

  // The same operations once more, of a plan that has not been launched.
  Plan again() const;

  // Fixes the order among the communicator's operations. `now`: nothing is before it, so that
  // peers may have what they need of it at once.
  void launch(bool now);

  // Runs the puts, which wait for nobody, then the transfers together, then the
  // waits for signals and the collectives in order; blocks. An error fails the
  // communicator.
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

// Plans that have streams in common. They are executed concurrently, because
// they may belong to ranks that wait for each other, once all their streams
// have come to them; and none of the streams goes on before all are done.
class Launch : public std::enable_shared_from_this<Launch> {
 public:
  void add(Plan plan);
  void absorb(Launch& other);
  bool sharesStream(const Plan& plan) const;
  bool usesCaller() const;  // the null stream

  // Enqueues on the streams. With the null stream among them it blocks until
  // done and returns the result.
  ncclResult_t start();

 private:
  // Whether the stream, if there is one alone, records a graph: then each
  // replay launches the plans.
  bool captured();
  ncclResult_t comeTo();
  ncclResult_t executeAll();
  bool anyFailed() const;

  std::vector<Plan> plans_;
  std::vector<cudaStream_t> streams_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  size_t awaited_ = 0;
  bool done_ = false;
  ncclResult_t result_ = ncclSuccess;
};

}  // namespace torchcomms_pg::shm
