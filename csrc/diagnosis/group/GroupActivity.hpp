// The report of this process about its groups, for other ranks, when a group hangs.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/AtomicShared.hpp"
#include "comm/InFlightOps.hpp"
#include "diagnosis/group/LatenessClient.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "diagnosis/status/ProcessStatus.hpp"
#include "host/Peer.hpp"
#include "operation/Group.hpp"
#include "operation/IssueCounts.hpp"

namespace torchcomms_pg {

// A group whose ranks diagnose together which rank holds it up: a communicator's group, or a
// watched one.
class GroupActivity {
 public:
  virtual ~GroupActivity() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const Group& group() const = 0;
  virtual std::vector<int64_t> globalRanks() const = 0;  // by rank; the rank itself if unknown
  int64_t globalRank() const { return globalRanks()[rank()]; }
  virtual uint64_t key() const = 0;  // see GroupCounts; 0 if the group has none
  virtual const InFlightOps& inFlight() const = 0;
  virtual const IssueCounts& issued() const = 0;
  // Returns whether operations are queued on a device, so that threads do not wait for them.
  virtual bool queues() const = 0;
  // Returns the thread that waits for the end of an operation in flight now, and since when.
  struct Waiter {
    uint64_t thread = 0;  // by threadNumber(); 0 if no thread is known to wait
    Clock::time_point since;
  };
  virtual Waiter waiterFor(const InFlight& entry) const;
  // Returns whether each rank of a rooted collective communicates with no rank but the root.
  virtual bool meetsRootAlone() const { return false; }
  // Returns whether the library that executes the operations detects that the ranks' sizes differ.
  bool comparesSizes() const { return !inFlight().totals().watched(); }
  // Returns whether a message may end, once the peer has issued its side, without notice to this
  // rank.
  bool endsUnseen() const { return inFlight().totals().watched() && !queues(); }
  // Returns the remaining time for which the rank has asked its peers to wait, or 0.
  virtual Milliseconds relaxed() const { return Milliseconds(0); }
  virtual bool closed() const = 0;
  // Returns the message of the group's failure, or "" if the group has not failed.
  virtual std::string failureMessage() const = 0;
  // Returns whether an operation of the group has failed. Blocks for at most 600 ms while the
  // reason of a backend's own error is found and printed.
  virtual bool hasFailed() noexcept { return !failureMessage().empty(); }
  // Leaves word for the other ranks, which may fail in the group, that this rank is about to end
  // it. `how`: "destroyed the group at ...". Blocks for at most 300 ms.
  virtual void leave(const std::string& how) noexcept = 0;
  // Returns what the standing verdict says of where the ranks parted, see Verdict; or "".
  virtual std::string parting() const { return ""; }
  // Returns the time from which the deadline of an operation in flight counts for a standing
  // verdict, or nullopt if nothing waits for the operation.
  virtual std::optional<Clock::time_point> begun(
      const InFlightOps::List& /*ops*/, const InFlight& entry) const {
    return entry.op->issued;
  }
  // Builds the request about `op`; the default has no fields for which the library is asked.
  // `deadline`: the deadline that has passed, `timeout` after the issue of `op` or after the begin
  // of a wait for `op`.
  virtual DiagnosisRequest request(
      const Operation& op, Clock::time_point now, Milliseconds timeout,
      Clock::time_point deadline) const;
  // Returns the client that finds late ranks.
  virtual const LatenessClient& lateness() const = 0;

  // The group's place in the process's status; null if the status does not show it.
  struct Place {
    uint64_t id = 0;
    std::string store;  // address of its store
  };
  AtomicShared<const Place> place;
};

// Includes `group`, while it exists, in the diagnoses of all groups.
void enlist(const std::shared_ptr<GroupActivity>& group);
// Returns the enlisted groups that still exist.
std::vector<std::shared_ptr<GroupActivity>> enlisted();

// Returns a key that is the same on all ranks of the group. Groups of another name or other ranks
// have another key. `part`: distinguishes the parts of a group that count their operations
// separately.
uint64_t keyOf(const GroupActivity& group, const std::string& part);

// Returns the ranks in their order, with runs as in "0-3, 7".
std::string asRuns(const std::vector<int64_t>& ranks);

// Writes the flight recorder's dump in another thread, since the wait for the GIL may be long; see
// process_recorder::dumpAfterFailure(). Does nothing, and returns an invalid future, if the
// interpreter is ending, or no thread can be started.
std::future<void> dumpApart(
    const GroupActivity& group, Milliseconds most = Milliseconds::max()) noexcept;

// Returns the numbers in the default group of `ranks` of the group.
std::vector<int64_t> globalRanksOf(const GroupActivity& group, const std::vector<int>& ranks);

// Returns whether a thread or a device's queue waits for an operation of the group's list `ops`, or
// may wait in a way that is not observed. Nothing waits for a message that nobody reads yet.
bool mayBeAwaited(const GroupActivity& group, const InFlightOps::List& ops, const InFlight& entry);
// Returns the record of an operation in flight, without the line that has issued it. `ops`: the
// group's operations in flight. `key`: the group's key; 0 if it is not unique. `here`: `group` is
// the diagnosed group, which the texts need not name.
status::OpInFlight recordOf(
    const GroupActivity& group, const InFlightOps::List& ops, const InFlight& entry, uint64_t key,
    bool here, Clock::time_point now);

// Describes the last operation of the group that has completed; `op.seq` is 0 if none has.
CompletedOp completedOf(const GroupActivity& group, const Operation& op);

// Returns what the rank has issued in the group, whose key is `key`.
GroupCounts countsOf(const GroupActivity& group, uint64_t key);

// Describes a rank that does not answer, by the state of its process.
Silent describeSilent(const Peer& peer);

// Returns the status of this rank for a diagnosis of the group.
HangDiagnosis::Snapshot snapshotOf(const GroupActivity& group, Clock::time_point now);

}  // namespace torchcomms_pg
