// One rank's side of a communicator. An ncclComm_t is its handle (api/Handles.hpp).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/Mutex.hpp"
#include "shm/Host.hpp"
#include "shm/Window.hpp"
#include "shm/collective/Exchange.hpp"
#include "shm/collective/Operators.hpp"
#include "shm/collective/TicketLock.hpp"
#include "shm/message/PointToPoint.hpp"
#include "shm/segment/Segment.hpp"
#include "shm/segment/Wait.hpp"

namespace torchcomms_pg::shm {

// The table of handles owns a Comm until its handle is destroyed or aborted. Every operation that
// still runs owns it, too, so that no memory is unmapped under a blocked thread. Functions may be
// called from any thread; the comments say which can block.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  // Claims `rank` in the segment that `id` names. Does not wait for the other ranks.
  static std::shared_ptr<Comm> join(const ncclUniqueId& id, int ranks, int rank, bool blocking);

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
  // Returns false if this process is a fork of the one that joined. checkProcess() then throws
  // NcclError.
  bool inOwnProcess() const { return forkGeneration_ == host::forkGeneration(); }
  void checkProcess() const;

  // Returns the result of a failure, ncclInProgress while ranks have not joined, or else
  // ncclSuccess. After revoke(), returns ncclInProgress until no thread uses the user's buffers.
  ncclResult_t asyncError() const;

  // Declares the communicator failed on every rank. Only the first failure is kept.
  void fail(const NcclError& failure) { segment_->fail(failure); }

  // Executes one collective in the calling thread; blocks. Throws NcclError.
  void run(const Collective& collective);

  // Publishes this rank's data for the collective with `ticket`, if that takes one small step and
  // no wait. Returns whether the data is published; if so, complete() has to follow.
  bool begin(uint64_t ticket, const Collective& collective) noexcept;
  // Returns whether begin() has published a collective for which complete() was not yet called.
  bool begun() const { return begun_.load(std::memory_order_relaxed); }
  // Executes the rest of a collective after begin(); call it in the Turn of the same ticket.
  // Blocks. Throws NcclError.
  void complete(const Collective& collective);

  // Count the plans that are issued and have not ended.
  void planIssued() { pending_.fetch_add(1, std::memory_order_relaxed); }
  void planEnded();
  void awaitPlans();  // blocks until they have ended, or up to 1 s after a failure

  // Returns the ranks that have not joined. If all have joined, returns the ranks that this rank
  // waits for: in its collective, or else for signals, or else in its oldest message. After a
  // failure, returns the ranks at fault, if known.
  std::vector<int> missingRanks();

  // Marks, while the object lives, that a thread accesses the user's buffers.
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

  // Calls body(exchange) in this thread, in the turn of a new ticket, for a collective of `kind`
  // that moves no data. An error fails the communicator, since the peers wait for this rank. The
  // error may be this rank's alone, such as too many open files. Blocks. Throws NcclError.
  template <class Body>
  auto inTurn(CollectiveKind kind, const Body& body) {
    const Turn turn(*this, ticketLock_.take());
    try {
      exchange_.begin(signatureOf({.kind = kind}));
      return body(exchange_);
    } catch (const NcclError& failure) {
      fail(failure);
      throw;
    }
  }

  void finalize();  // blocks as awaitPlans() does
  void destroy();   // blocks as awaitPlans() does, and up to 2 s for callbacks of messages
  void abort();     // blocks up to 3 s, for callbacks and for threads that use the user's buffers
  void revoke();    // blocks as abort() does
  bool revoked() const { return revoked_.load(); }
  std::string whoAmI() const;  // "rank 1 (pid 4711)"

  // Make and end a handle of a registered buffer. Registration has no other effect.
  void* registerBuffer();
  void deregisterBuffer(void* handle);

  // The lowest surviving rank of a shrink publishes the new communicator's id with offerShrink().
  // The other survivors wait in takeShrinkOffer(), which returns nullopt once `deadline` has
  // passed. `excluded` identifies the shrink: a hash of the surviving ranks.
  void offerShrink(uint64_t excluded, const ncclUniqueId& id);
  std::optional<ncclUniqueId> takeShrinkOffer(
      int leader, uint64_t excluded, std::chrono::steady_clock::time_point deadline);

 private:
  Comm(std::shared_ptr<Segment> segment, int rank, bool blocking);
  void leave(Phase phase);  // publishes that this rank has left, and wakes its peers
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
  mutable std::atomic<bool> ready_{false};  // whether all ranks have joined
  // Used while ranks join.
  mutable std::atomic<std::chrono::steady_clock::time_point> nextLifeCheck_{};
  std::atomic<bool> finalized_{false};
  std::atomic<bool> revoked_{false};

  mutable Mutex mutex_;
  std::condition_variable planEnded_;
  std::set<uintptr_t> registrations_ GUARDED_BY(mutex_);
  uintptr_t nextRegistration_ GUARDED_BY(mutex_) = 1;
  std::map<int, uint32_t> takenOffers_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg::shm
