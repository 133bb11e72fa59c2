// A communicator as one rank holds it: what an ncclComm_t points to.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shm/Host.hpp"
#include "shm/Window.hpp"
#include "shm/collective/Exchange.hpp"
#include "shm/collective/Operators.hpp"
#include "shm/collective/TicketLock.hpp"
#include "shm/message/PointToPoint.hpp"
#include "shm/segment/Segment.hpp"
#include "shm/segment/Wait.hpp"

namespace torchcomms_pg::shm {

// Owned by the table of handles (Handles.hpp) until it is destroyed or aborted,
// and by every operation that is still running, so that memory is not unmapped
// under a blocked thread. Functions may be called from any thread; those that
// can block say so.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  // Claims `rank` in the segment that `id` names. Does not wait for the other ranks.
  static std::shared_ptr<Comm> join(const ncclUniqueId& id, int ranks, int rank, bool blocking);
  ~Comm();

  int rank() const { return rank_; }
  int size() const { return segment_->size(); }
  bool blocking() const { return blocking_; }
  Segment& segment() const { return *segment_; }
  const Waiter& waiter() const { return waiter_; }
  PointToPoint& pointToPoint() { return pointToPoint_; }
  Exchange& exchange() { return exchange_; }
  Windows& windows() { return windows_; }
  TicketLock& ticketLock() { return ticketLock_; }
  Operators& operators() { return operators_; }

  bool allJoined() const;
  void awaitJoined();  // blocks

  // Throws NcclError unless operations may be issued.
  void checkUsable() const;
  // Throws NcclError if this process is a fork of the one that joined.
  void checkProcess() const;

  // Returns ncclSuccess, ncclInProgress, or the result with which the communicator has failed.
  ncclResult_t asyncError() const;

  // Declares the communicator failed on every rank; the first failure wins.
  void fail(const NcclError& failure);

  // Executes one collective in the calling thread; blocks. Throws NcclError.
  void run(const Collective& collective);

  // Executes the first half of the collective with `ticket`, if it can be done without waiting, and
  // returns whether it was done. complete() then follows in the ticket's Turn.
  bool begin(uint64_t ticket, const Collective& collective) noexcept;
  // Returns whether a collective is between its halves.
  bool begun() const { return begun_.load(std::memory_order_relaxed); }
  // Executes the second half; call in the ticket's Turn. Blocks. Throws NcclError.
  void complete(const Collective& collective);

  // Count plans from their issue to their end.
  void planIssued() { pending_.fetch_add(1, std::memory_order_relaxed); }
  void planEnded();
  void awaitPlans();  // blocks

  // Returns the ranks that the oldest unfinished operation waits for; after a failure the ranks at
  // fault, if known.
  std::vector<int> missingRanks();

  // Marks an access to the user's buffers, for its lifetime.
  class Active {
   public:
    explicit Active(Comm& comm) : comm_(comm) { comm_.active_.fetch_add(1); }
    ~Active() { comm_.active_.fetch_sub(1); }

   private:
    Comm& comm_;
  };

  // The turn of a ticket of ticketLock(), held for the lifetime of the object.
  class Turn {
   public:
    // Blocks until all earlier tickets have passed. Throws NcclError.
    Turn(Comm& comm, uint64_t ticket);
    ~Turn();

   private:
    Comm& comm_;
    const uint64_t ticket_;
  };

  void finalize();  // blocks until this rank's plans have ended
  void destroy();   // likewise
  void abort();     // blocks a bounded time, while threads leave the user's buffers
  void revoke();    // likewise
  bool revoked() const { return revoked_.load(); }
  std::string whoAmI() const;  // "rank 1 (pid 4711)"

  // Give out and take back handles of registered buffers; registration has no other effect.
  void* registerBuffer();
  void deregisterBuffer(void* handle);

  // Publish the id of the communicator that a shrink makes (on the leader), and take it (on every
  // other survivor; blocks). The result is null if `deadline` passes first.
  void offerShrink(uint64_t excluded, const ncclUniqueId& id);
  std::optional<ncclUniqueId> takeShrinkOffer(
      int leader, uint64_t excluded, std::chrono::steady_clock::time_point deadline);

 private:
  Comm(std::shared_ptr<Segment> segment, int rank, bool blocking);
  void leave(Phase phase);  // marks this rank as gone, and wakes the peers
  void awaitQuiet();

  const std::shared_ptr<Segment> segment_;
  const RanksOnHost ranksOnHost_;
  const int rank_;
  const bool blocking_;
  const uint32_t forkGeneration_;
  const Waiter waiter_;
  TicketLock ticketLock_;
  Exchange exchange_;
  PointToPoint pointToPoint_;
  Windows windows_;
  Operators operators_;

  std::atomic<bool> exchanging_{false};
  std::atomic<bool> begun_{false};
  std::atomic<int> active_{0};
  std::atomic<int64_t> pending_{0};
  mutable std::atomic<bool> ready_{false};         // all ranks have joined
  mutable std::atomic<int64_t> nextLifeCheck_{0};  // in milliseconds, while ranks are joining
  std::atomic<bool> finalized_{false};
  std::atomic<bool> revoked_{false};

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable planEnded_;
  std::set<uintptr_t> registrations_;
  uintptr_t nextRegistration_ = 1;
  std::map<int, uint32_t> takenOffers_;
};

}  // namespace torchcomms_pg::shm
