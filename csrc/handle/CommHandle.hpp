// The library's communicator, from the call that makes it until it is freed.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/Mutex.hpp"
#include "handle/BlockingCall.hpp"
#include "handle/OwnProcess.hpp"
#include "host/NcclError.hpp"
#include "nccl/Allocator.hpp"
#include "nccl/Config.hpp"
#include "nccl/Library.hpp"
#include "operation/CommError.hpp"

namespace torchcomms_pg {

// Owns the library's communicator. Thread-safe. Call close() only when nothing is in flight. In a
// forked child a CommHandle does not call the library and ends nothing: the memory and connections
// belong to the parent's rank, and the library's threads do not exist.
class CommHandle {
 public:
  // A communicator that may still be initializing, or the call that makes one.
  struct Made {
    ncclComm_t comm = nullptr;
    std::unique_ptr<BlockingCall> call = nullptr;
  };

  // Time within which a failed library must release a blocked operation.
  static constexpr std::chrono::seconds kReleasePatience{10};

  CommHandle(const Library& api, Made made, c10::Device device);
  CommHandle(const CommHandle&) = delete;
  CommHandle& operator=(const CommHandle&) = delete;

  const Library& api() const { return api_; }
  // Returns the process that made this object.
  const OwnProcess& process() const { return process_; }

  // Returns whether calls that make or end communicators may block; see BlockingCall.
  bool blocks() const { return blocks_; }

  // Returns the communicator, which may still be initializing. Returns null while a BlockingCall
  // makes the communicator, and after the communicator's end.
  ncclComm_t get() const { return comm_.load(std::memory_order_acquire); }

  // Returns whether join() has found that all ranks have joined.
  bool ready() const { return ready_.load(std::memory_order_acquire); }

  // Checks whether all ranks have joined. Returns ncclSuccess if so, ncclInProgress if some rank
  // has not joined yet, or the error if joining has failed.
  ncclResult_t join();

  // Calls `body` with the communicator, which is not freed meanwhile. Does nothing without a
  // communicator and in a forked child.
  template <class Body>
  void with(Body&& body) const {
    if (!process_.isThis()) {
      return;
    }
    LockGuard lock(mutex_);
    if (auto* const comm = get()) {
      body(comm);
    }
  }

  // Returns the library's asynchronous error, or `freed` without a communicator. Does not block.
  ncclResult_t state(ncclResult_t freed = ncclSuccess) const;
  // Does the same for an operation that was launched, but returns ncclInvalidUsage without a
  // communicator: a close() that gave up waiting for the operation has then freed the communicator,
  // and the operation's outcome is unknown.
  ncclResult_t stateAfterLaunch() const { return state(ncclInvalidUsage); }
  bool failed() const {
    const auto now = state();
    return now != ncclSuccess && now != ncclInProgress;
  }

  // Returns the asynchronous error, the library's text and missingRanks(). The text may be empty or
  // belong to an earlier error.
  host::NcclError report() const;
  std::vector<int> missingRanks() const;
  bool absenceIsCertain() const { return api_.absenceIsCertain(); }

  // Adds `times` to the counter that the monitors of this host's ranks poll, and returns the sum,
  // or 0 if the library has no such counter.
  uint64_t ring(uint64_t times) const;

  // Fails the communicator, which releases threads that are blocked in the library. Feature::fail
  // does so on all ranks. libnccl's communicator is revoked or aborted on this rank only, by a
  // separate thread, which keeps `owner` alive. Does not block. Has an effect once.
  void fail(const Failure& failure, std::shared_ptr<const void> owner);
  // Returns true from fail() on until its thread has revoked libnccl's communicator, or has taken
  // it away to abort it.
  bool failing() const { return failing_ && !released_; }

  // Makes and returns a communicator without the excluded ranks. Throws NcclError; its result is
  // ncclInProgress if some remaining rank has not arrived by the deadline.
  ncclComm_t shrink(
      const std::vector<int>& excluded, int flags, const NcclConfig& config,
      Clock::time_point deadline) const;

  // Records that the end of the communicator has begun. Returns false if it had begun before.
  bool beginEnd() { return !closed_.exchange(true, std::memory_order_acq_rel); }
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // Ends the communicator, even while ranks are joining, and drops the objects of keepUntilEnd().
  // If `failed`, aborts the communicator, and does not finish what peers might wait for. Returns
  // the library's text if the ranks' last operations do not match, otherwise "".
  std::string close(bool failed);

  // Ends the communicator without waiting, if close() was not called.
  void discard(bool failed);
  // Forgets the communicator, which belongs to the parent process.
  void forget();

  // Keeps `object` until the communicator has ended.
  void keepUntilEnd(std::shared_ptr<const void> object);

  // Keeps other threads from passing operations to the library while the result lives. Streams must
  // hold operations in the order in which the library receives them. Otherwise an operation could
  // be queued in a stream behind a later one that waits for it.
  [[nodiscard]] auto holdOrder() { return std::unique_lock(orderMutex_); }

  // Returns the memory that is registered with the communicator.
  Registrations& registrations() { return registrations_; }

  // Sets whether the communicator's memory is suspended. Returns whether the value has changed.
  bool setSuspended(bool suspended) { return suspended_.exchange(suspended) != suspended; }
  bool suspended() const { return suspended_.load(std::memory_order_acquire); }
  void refuseSuspended(const std::string& group) const {
    TORCH_CHECK(
        !C10_UNLIKELY(suspended()), "group '", group,
        "' is suspended; call resume() on all of its ranks first");
  }

  // Records that graphs hold operations of the communicator: libnccl then ends the communicator
  // only after these graphs have been destroyed.
  void noteCaptured() { captured_.store(true, std::memory_order_relaxed); }
  bool captured() const { return captured_.load(std::memory_order_relaxed); }

 private:
  void failNow();
  // Returns whether the communicator must stay until the process ends. NCCL frees a revoked
  // communicator without waiting for its graphs (src/init.cc, commReclaim). Their destruction would
  // then use freed memory (src/enqueue.cc, persistentDestructor).
  bool leftToGraphs() const { return captured_ && revoked_; }
  void endJoining(bool failed);
  std::string end(ncclComm_t comm, bool failed);
  // Calls `body`, which ends the communicator. If `body` may block, calls it in a separate thread
  // and returns that call; otherwise returns null.
  template <class Body>
  std::unique_ptr<BlockingCall> endDetached(Body body) const;

  const Library& api_;
  const c10::Device device_;
  const bool blocks_;
  const OwnProcess process_;
  mutable Mutex mutex_;  // held to replace comm_ or to use it, never for long
  std::atomic<ncclComm_t> comm_;
  const std::unique_ptr<BlockingCall> joining_;  // makes comm_; null if comm_ was given
  std::atomic<bool> ready_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> captured_{false};
  std::atomic<bool> revoked_{false};  // libnccl has revoked the communicator
  std::atomic<bool> suspended_{false};
  std::timed_mutex failMutex_;  // held by failNow() and close()
  std::atomic<bool> failing_{false};
  std::atomic<bool> released_{false};  // set by the thread that fail() starts
  std::timed_mutex orderMutex_;
  Registrations registrations_;
  Mutex keptMutex_;
  std::vector<std::shared_ptr<const void>> kept_ GUARDED_BY(keptMutex_);
};

}  // namespace torchcomms_pg
