// The library's communicator, from the call that makes it until it is freed.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/BlockingCall.hpp"
#include "comm/CommError.hpp"
#include "comm/OwnProcess.hpp"
#include "host/NcclError.hpp"
#include "nccl/Allocator.hpp"
#include "nccl/Config.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

// Owns the library's communicator. Thread-safe. Call close() only when nothing is in flight. In a
// forked child it makes no calls of the library and ends nothing: the memory and connections belong
// to the parent's rank, and the threads do not exist.
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

  // Returns whether calls that make or end communicators may block; see BlockingCall.
  bool blocks() const { return blocks_; }

  // Returns null until all ranks have joined, and after the communicator has been freed.
  ncclComm_t get() const { return comm_.load(std::memory_order_acquire); }

  // Returns whether all ranks have joined, as far as join() has found out.
  bool ready() const { return ready_.load(std::memory_order_acquire); }

  // Checks whether all ranks have joined. Returns ncclInProgress if they have not yet, or an error
  // if they never will.
  ncclResult_t join();

  // Calls `body` with the communicator, which is not freed meanwhile. Does nothing if there is no
  // communicator.
  template <class Body>
  void with(Body&& body) const {
    if (!process_.isThis()) {
      return;
    }
    std::lock_guard lock(mutex_);
    if (auto* const comm = get()) {
      body(comm);
    }
  }

  // Returns the library's asynchronous error. Does not block.
  ncclResult_t state() const;
  // Returns the same after an operation was launched, or ncclInvalidUsage if an end that gave up
  // waiting has freed the communicator: whether the operation has succeeded is then unknown.
  ncclResult_t stateAfterLaunch() const;
  bool failed() const {
    const auto now = state();
    return now != ncclSuccess && now != ncclInProgress;
  }

  // Returns the asynchronous error with the library's text, which may be empty or from an earlier
  // error, and with the ranks that the library waits for, if known.
  host::NcclError report() const;
  std::vector<int> missingRanks() const;
  bool absenceIsCertain() const { return api_.absenceIsCertain(); }

  // Adds `times` to the request count that the monitors of this host's ranks poll, and returns the
  // count, or 0 if the library has none.
  uint64_t ring(uint64_t times) const;

  // Makes the library fail on all ranks, which releases threads that are blocked in it. Does not
  // block: libnccl is revoked or aborted in another thread, which keeps `owner` alive. Has an
  // effect once.
  void fail(const Failure& failure, std::shared_ptr<const void> owner);
  // Returns whether the thread of fail() is still busy.
  bool failing() const { return failing_ && !released_; }

  // Makes a communicator without the excluded ranks. Throws NcclError: with ncclInProgress if not
  // all remaining ranks arrived by the deadline.
  ncclComm_t shrink(
      const std::vector<int>& excluded,
      int flags,
      const NcclConfig& config,
      Clock::time_point deadline) const;

  // Ends the communicator, even while ranks are joining, and frees what was kept. `failed`: does
  // not finish what peers might wait for. Returns the library's text if the ranks' last operations
  // do not match.
  std::string close(bool failed);

  // Ends the communicator without waiting, if close() was not called.
  void discard(bool failed);
  // Leaves the communicator to the parent process.
  void forget();

  // Keeps `object` until the communicator has ended.
  void keepUntilEnd(std::shared_ptr<const void> object);

  // Blocks all other operations that are about to enter the library. Streams must hold operations
  // in the order in which the library receives them: otherwise the first could wait behind the
  // second, which waits for the first.
  [[nodiscard]] auto holdOrder() { return std::unique_lock(orderMutex_); }

  // Memory that is registered with the communicator.
  Registrations& registrations() { return registrations_; }

  // Sets whether the communicator's memory is suspended. Returns whether that is a change.
  bool setSuspended(bool suspended) { return suspended_.exchange(suspended) != suspended; }
  bool suspended() const { return suspended_.load(std::memory_order_acquire); }
  void refuseSuspended(const std::string& group) const {
    TORCH_CHECK(
        !C10_UNLIKELY(suspended()),
        "group '",
        group,
        "' is suspended; call resume() on all of its ranks first");
  }

  // Records that graphs hold operations of the communicator: libnccl ends it only after those
  // graphs.
  void noteCaptured() { captured_.store(true, std::memory_order_relaxed); }
  bool captured() const { return captured_.load(std::memory_order_relaxed); }

 private:
  // Returns the library's asynchronous error, or `freed` without a communicator.
  ncclResult_t stateOr(ncclResult_t freed) const;
  void failNow();
  // Returns whether the communicator must stay until the process ends. NCCL frees a revoked one
  // without waiting for its graphs (src/init.cc, commReclaim), whose destruction then uses it
  // (src/enqueue.cc, persistentDestructor).
  bool leftToGraphs() const { return captured_ && revoked_; }
  void endJoining(bool failed);
  std::string end(ncclComm_t comm, bool failed);
  // Calls `body`, which ends the communicator: in a separate thread if it may block. Returns null
  // if `body` was called in this thread.
  template <class Body>
  std::unique_ptr<BlockingCall> endDetached(Body body) const;

  const Library& api_;
  const c10::Device device_;
  const bool blocks_;
  const OwnProcess process_;  // the process that has joined the ranks
  mutable std::mutex mutex_;  // held to replace comm_ or to make it fail, never for long
  std::atomic<ncclComm_t> comm_;
  const std::unique_ptr<BlockingCall> joining_;  // makes comm_; null if comm_ was given
  std::atomic<bool> ready_{false};
  std::atomic<bool> captured_{false};
  std::atomic<bool> revoked_{false};  // libnccl has revoked the communicator
  std::atomic<bool> suspended_{false};
  std::timed_mutex failMutex_;  // held while libnccl is made to fail
  std::atomic<bool> failing_{false};
  std::atomic<bool> released_{false};  // set by the thread that fail() starts
  std::timed_mutex orderMutex_;
  Registrations registrations_;
  std::mutex keptMutex_;
  std::vector<std::shared_ptr<const void>> kept_;
};

}  // namespace torchcomms_pg
