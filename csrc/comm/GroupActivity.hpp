// What this process tells other ranks of the groups it is in, when one of them hangs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/InFlightOps.hpp"
#include "comm/IssueCounts.hpp"
#include "comm/LatenessClient.hpp"
#include "comm/Peer.hpp"
#include "monitor/HangDiagnosis.hpp"
#include "operation/Group.hpp"

namespace torchcomms_pg {

// A group whose ranks find out together who holds it up: that of a communicator, or a watched one.
class GroupActivity {
 public:
  virtual ~GroupActivity() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const Group& group() const = 0;
  virtual std::vector<int64_t> globalRanks() const = 0;  // by rank; unknown: the rank itself
  virtual uint64_t key() const = 0;                      // see GroupCounts; 0: it has none
  virtual const InFlightOps& inFlight() const = 0;
  virtual const IssueCounts& issued() const = 0;
  // Returns whether operations are queued on a device, for which the threads do not wait.
  virtual bool queues() const = 0;
  // Returns whether every rank exchanges its part of a rooted collective with the root alone.
  virtual bool meetsRootAlone() const = 0;
  // Returns whether who executes the operations finds out by itself that the ranks' sizes differ.
  virtual bool comparesSizes() const = 0;
  // Returns whether a message that the other side has met may have ended, which nobody is told.
  virtual bool endsUnseen() const = 0;
  // Returns the time for which the rank has asked its peers to wait longer.
  virtual Milliseconds relaxed() const = 0;
  virtual bool closed() const = 0;
  // Returns what knows which rank is late.
  virtual const LatenessClient& lateness() const = 0;
};

// Has `group` told of in the diagnoses of all groups, as long as it lives.
void enlist(const std::shared_ptr<GroupActivity>& group);
// Returns the enlisted groups that live.
std::vector<std::shared_ptr<GroupActivity>> enlisted();

// Returns what tells a group from every other, and is the same on its ranks. `part`: tells the
// parts of a group apart that count their operations each for itself.
uint64_t keyOf(const GroupActivity& group, const std::string& part);

// Returns whether a thread waits for the end of the operation now.
bool isAwaited(const InFlight& entry);
// Returns whether a thread may wait for its end, though nobody can tell.
bool mayBeAwaited(const InFlight& entry);
// Returns what `op` of `group`, which has `ops` in flight, needs. `key`: the group's; 0: it cannot
// be told from another. `here`: of the group asked about, which the text need not name.
Wait describeWait(
    const GroupActivity& group,
    const InFlightOps::List& ops,
    const Operation& op,
    uint64_t key,
    bool here);

// Describes a rank that does not answer, by its process.
Silent describeSilent(const Peer& peer);

// Builds the request about `op` of the group, as far as that does not depend on who executes it.
// `deadline`: that of the operation, `timeout` after its issue or the end of what it waited for.
DiagnosisRequest requestAbout(
    const GroupActivity& group,
    const Operation& op,
    Clock::time_point now,
    Milliseconds timeout,
    Clock::time_point deadline);

// Returns the status of this rank for a diagnosis of the group.
HangDiagnosis::Snapshot snapshotOf(const GroupActivity& group, Clock::time_point now);

}  // namespace torchcomms_pg
