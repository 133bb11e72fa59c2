// What this process reports to other ranks about its groups, when one of them hangs.
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

// A group whose ranks diagnose together which rank holds it up: a communicator's group, or a
// watched one.
class GroupActivity {
 public:
  virtual ~GroupActivity() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const Group& group() const = 0;
  virtual std::vector<int64_t> globalRanks() const = 0;  // by rank; the rank itself if unknown
  virtual uint64_t key() const = 0;                      // see GroupCounts; 0 if it has none
  virtual const InFlightOps& inFlight() const = 0;
  virtual const IssueCounts& issued() const = 0;
  // Returns whether operations are queued on a device, so that threads do not wait for them.
  virtual bool queues() const = 0;
  // Returns whether each rank of a rooted collective communicates with the root alone.
  virtual bool meetsRootAlone() const = 0;
  // Returns whether the library that executes the operations detects by itself that the ranks'
  // sizes differ.
  virtual bool comparesSizes() const = 0;
  // Returns whether a message may end without notice once the peer has issued its side.
  virtual bool endsUnseen() const = 0;
  // Returns the time for which the rank has asked its peers to wait longer.
  virtual Milliseconds relaxed() const = 0;
  virtual bool closed() const = 0;
  // Returns the client that finds late ranks.
  virtual const LatenessClient& lateness() const = 0;
};

// Includes `group` in the diagnoses of all groups, as long as it lives.
void enlist(const std::shared_ptr<GroupActivity>& group);
// Returns the enlisted groups that are alive.
std::vector<std::shared_ptr<GroupActivity>> enlisted();

// Returns a key that is the same on all ranks of the group, and differs from every other group's.
// `part`: distinguishes the parts of a group that count their operations separately.
uint64_t keyOf(const GroupActivity& group, const std::string& part);

// Returns whether a thread waits for the end of the operation now.
bool isAwaited(const InFlight& entry);
// Returns whether a thread may wait for the operation's end, although that cannot be seen.
bool mayBeAwaited(const InFlight& entry);
// Returns what `op` of `group` waits for. `ops`: the group's operations in flight. `key`: the
// group's key; 0 if it is not unique. `here`: `group` is the diagnosed group, which the text need
// not name.
Wait describeWait(
    const GroupActivity& group,
    const InFlightOps::List& ops,
    const Operation& op,
    uint64_t key,
    bool here);

// Describes a rank that does not answer, by its process.
Silent describeSilent(const Peer& peer);

// Builds the request about `op` of the group, without the fields for which the library is asked.
// `deadline`: the deadline of `op`, which is `timeout` after the issue of `op` or after the end of
// what `op` waited for.
DiagnosisRequest requestAbout(
    const GroupActivity& group,
    const Operation& op,
    Clock::time_point now,
    Milliseconds timeout,
    Clock::time_point deadline);

// Returns the status of this rank for a diagnosis of the group.
HangDiagnosis::Snapshot snapshotOf(const GroupActivity& group, Clock::time_point now);

}  // namespace torchcomms_pg
