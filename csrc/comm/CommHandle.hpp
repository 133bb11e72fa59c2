// The library's communicator, from the call that makes it until it is given back.
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
#include "nccl/Config.hpp"
#include "nccl/Memory.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Owns the library's communicator. Thread-safe. The caller of close() sees to it that nothing is in
// flight. In a forked child it asks the library for nothing and ends nothing: memory and
// connections are those of the parent's rank, and the threads do not exist.
class CommHandle {
 public:
  // A communicator that may still be initializing, or the call that makes one.
  struct Made {
    ncclComm_t comm = nullptr;
    std::unique_ptr<BlockingCall> call = nullptr;
  };

  // The library's report of a failure.
  struct Report {
    ncclResult_t state = ncclSuccess;
    std::string text;         // the library's words; empty: none
    std::vector<int> absent;  // ranks that it waits for, where known
  };

  // Time that a failed library gets to let go of a blocked operation.
  static constexpr std::chrono::seconds kReleasePatience{10};

  CommHandle(const NcclApi& api, Made made, c10::Device device);
  CommHandle(const CommHandle&) = delete;
  CommHandle& operator=(const CommHandle&) = delete;

  const NcclApi& api() const { return api_; }

  // Returns whether calls that make or end communicators may block; see BlockingCall.
  bool blocks() const { return blocks_; }

  // Returns null until all ranks have joined, and once the communicator has been given back.
  ncclComm_t get() const { return comm_.load(std::memory_order_acquire); }

  // Returns whether all ranks have joined, as far as join() has found out.
  bool ready() const { return ready_.load(std::memory_order_acquire); }

  // Finds out whether all ranks have joined by now. ncclInProgress: not yet; an error: they never
  // will.
  ncclResult_t join();

  // Calls `body` with the communicator, which nobody gives back meanwhile; does nothing where there
  // is none.
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
  bool failed() const {
    const auto now = state();
    return now != ncclSuccess && now != ncclInProgress;
  }

  Report report() const;
  std::vector<int> absentRanks() const;
  bool absenceIsCertain() const { return api_.absenceIsCertain; }

  // Adds `times` to the count of requests that all ranks' monitors look at, and returns it. 0: the
  // library has no such count.
  uint64_t ring(uint64_t times) const;

  // Makes the library fail on all ranks, which releases the threads that are blocked in it. Does
  // not block: libnccl is revoked or aborted in another thread, which keeps `owner`. Has an effect
  // once.
  void fail(const Failure& failure, std::shared_ptr<const void> owner);
  // Returns whether that thread is still busy.
  bool failing() const { return failing_ && !released_; }

  // Makes a communicator without the excluded ranks. Null: `report` tells why; ncclInProgress: not
  // all ranks that stay have come by the deadline.
  ncclComm_t shrink(
      const std::vector<int>& excluded,
      int flags,
      const NcclConfig& config,
      Clock::time_point deadline,
      Report& report) const;

  // Ends the communicator, also one whose ranks are still joining, and frees what was kept.
  // `failed`: does not finish what peers might wait for. Returns the state before; a text only
  // where the library says that the ranks' last operations do not match.
  Report close(bool failed);

  // Ends the communicator without waiting, where close() was not called.
  void discard(bool failed);
  // Leaves the communicator to the process that this one was forked from.
  void forget();

  // Frees `object` when the communicator has ended, and not before.
  void keepUntilEnd(std::shared_ptr<const void> object);

  // Holds up all other operations that are about to go into the library: streams must hold
  // operations in the order in which the library has received them, or the first would wait behind
  // the second, which waits for the first.
  [[nodiscard]] auto holdOrder() { return std::unique_lock(orderMutex_); }

  // Memory that is registered with the communicator.
  Registrations& registrations() { return registrations_; }

  // Sets whether the communicator's own memory has been given back, until it resumes. Returns
  // whether that is new.
  bool setSuspended(bool suspended) { return suspended_.exchange(suspended) != suspended; }
  bool suspended() const { return suspended_.load(std::memory_order_acquire); }
  void refuseSuspended(const std::string& group) const {
    TORCH_CHECK(
        !C10_UNLIKELY(suspended()),
        "group '",
        group,
        "' is suspended; call resume() on all of its ranks first");
  }

  // Notes that graphs hold operations of the communicator: libnccl ends it only when they have
  // gone.
  void noteCaptured() { captured_.store(true, std::memory_order_relaxed); }
  bool captured() const { return captured_.load(std::memory_order_relaxed); }

 private:
  void failNow();
  // Returns whether the communicator is to stay until the process ends: NCCL frees one that was
  // revoked without waiting for its graphs (src/init.cc, commReclaim), whose end then uses it
  // (src/enqueue.cc, persistentDestructor).
  bool leftToGraphs() const { return captured_ && revoked_; }
  void endJoining(bool failed);
  std::string end(ncclComm_t comm, bool failed);
  // Calls `body`, which ends the communicator; where that may block, in a thread of its own. Null:
  // `body` has been called here.
  template <class Body>
  std::unique_ptr<BlockingCall> endApart(Body body) const;

  const NcclApi& api_;
  const c10::Device device_;
  const bool blocks_;
  const OwnProcess process_;  // that has joined the ranks
  mutable std::mutex mutex_;  // held to replace comm_ or to make it fail, never for long
  std::atomic<ncclComm_t> comm_;
  const std::unique_ptr<BlockingCall> joining_;  // makes comm_; null: it was there at once
  std::atomic<bool> ready_{false};
  std::atomic<bool> captured_{false};
  std::atomic<bool> revoked_{false};  // by libnccl
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
