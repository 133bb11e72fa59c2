// The checks by which a communicator fails: deadlines, dead ranks, and failures that the library or
// other ranks report.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/AtomicShared.hpp"
#include "base/Mutex.hpp"
#include "comm/Observer.hpp"
#include "host/Peer.hpp"
#include "monitor/Deadlines.hpp"
#include "monitor/MonitorThread.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class CommHandle;
class DeferredOps;
class FailureState;
class Identity;
class InFlightOps;

// Makes the communicator's observer explain what it finds. Thread-safe.
class Watchdog {
 public:
  Watchdog(
      const Identity& self, const CommHandle& library, const InFlightOps& inFlight,
      DeferredOps& deferred, FailureState& failureState, Observer& observer)
      : self_(self),
        library_(library),
        inFlight_(inFlight),
        deferred_(deferred),
        failureState_(failureState),
        observer_(observer) {}

  // `store`, `prefix`: see Observer::open(). `peers`: the ranks' processes. Without a store, and in
  // a group of one rank, nothing is observed.
  void open(
      const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
      std::vector<Peer> peers);
  // Does the same as open(), in a part of the parent's store, and as watchOver() if the parent
  // watches over processes. `ranks`: the ranks of the parent that are in this group.
  void openLike(const Watchdog& parent, const std::string& prefix, const std::vector<int>& ranks);
  // Does the same for a shrunk group without the ranks of `gone`. If the parent is shrunk several
  // times without the same ranks, each shrink gets another part of the store, by a number that is
  // the same on all staying ranks: a reused part would hold the verdict of an earlier group.
  void openShrunk(Watchdog& parent, const std::vector<int>& gone);
  // From now on checks whether processes of this host are alive, if operations in flight need them,
  // for a library that does not report deaths. Call once, after open().
  void watchOver();

  // Does what is due. Called in each round of the monitor.
  void check(Clock::time_point now) noexcept REQUIRES(monitorThread);

  // Makes the observer explain why a wait of `timeout` for `op` did not end at `deadline`. Blocks,
  // as Observer::await() does. Returns how much longer to wait, or nullopt if the communicator has
  // failed.
  std::optional<Milliseconds> judge(
      const Operation& op, Milliseconds timeout, Clock::time_point deadline);

 private:
  // Fails the communicator if an operation in flight can no longer end, since a rank has died.
  // Returns whether it has failed the communicator.
  bool noticeDeath(Clock::time_point now) REQUIRES(monitorThread);
  // Once the observer has explained why the deadline of an operation has passed, fails the
  // communicator or extends the deadline.
  void checkDeadline(const std::optional<Operation>& overdue, Clock::time_point now)
      REQUIRES(monitorThread);
  // Starts a thread that finds out why the library failed while `op` was in flight, and fails the
  // communicator. The monitor's thread must not block for this: the observer answers other ranks in
  // that thread.
  void explainFailure(const Operation& op);
  // Start a thread that fails the communicator while nothing is in flight: learnOfFailure() if the
  // library has failed, learnOfVerdict() if other ranks have failed the group.
  void learnOfFailure();
  void learnOfVerdict();
  // Prints why `op` goes on waiting after `timeout`, once for each operation.
  void printExtension(const Operation& op, Milliseconds timeout, const std::string& why);
  void apart(std::function<void()> body);

  const Identity& self_;
  const CommHandle& library_;
  const InFlightOps& inFlight_;
  DeferredOps& deferred_;
  FailureState& failureState_;
  Observer& observer_;
  c10::intrusive_ptr<c10d::Store> store_;  // this communicator's part; null if it has none
  std::vector<Peer> peers_;
  Mutex shrunkMutex_;
  // Number of shrinks, by the ranks left out.
  std::map<std::vector<int>, int> shrunk_ GUARDED_BY(shrunkMutex_);
  std::atomic<bool> explaining_{false};
  std::atomic<uint64_t> extended_{0};  // seq of the operation whose extension was printed last

  using Watched = std::vector<std::pair<int, Peer>>;
  AtomicShared<const Watched> watched_;  // may be null

  Clock::time_point lookedAt_ GUARDED_BY(monitorThread){};  // time of the last look at `watched_`
  // Dead ranks, each with the time at which its death became known.
  std::map<int, Clock::time_point> dead_ GUARDED_BY(monitorThread);
  int idleTicks_ GUARDED_BY(monitorThread) = 0;
  Deadlines deadlines_ GUARDED_BY(monitorThread);
  // The operation that the observer is to explain.
  std::optional<Operation> overdue_ GUARDED_BY(monitorThread);
};

}  // namespace torchcomms_pg
