// The status of this process, for python -m torchcomms_pg.status. A server of this process reports
// what the process's groups do; other hosts get the report through the job's store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/group/GroupActivity.hpp"
#include "diagnosis/status/Hosts.hpp"
#include "diagnosis/status/Job.hpp"
#include "diagnosis/status/StatusServer.hpp"

namespace torchcomms_pg {

// Includes a group in this process's status, while this object exists and the group is open. A
// process without such groups has no status.
class StatusPart {
 public:
  // Begins to include `group`, which is enlisted. `store`: the group's part of the job's store.
  // `severalHosts`: whether its ranks may be on more than one host. Returns null if the status is
  // turned off, or if no server can be started, which is printed to stderr.
  static std::shared_ptr<const StatusPart> begin(
      GroupActivity& group, const c10::intrusive_ptr<c10d::Store>& store, bool severalHosts);

 private:
  std::shared_ptr<status::StatusServer> server_;
  std::shared_ptr<status::Hosts> hosts_;  // null if all ranks are on this host, or after an error
};

// Whom an operation waits for.
struct HeldUp {
  std::string text;            // the rest of a line, see status::Job::heldUpBy(), or ""
  std::vector<int64_t> ranks;  // their numbers in the default group
  std::string calledAt;        // the line of this rank's call, or ""
};

// Asks the job's processes whom `op` of `group` waits for. Leaves out what is not known within
// `patience`. Blocks.
HeldUp heldUpBy(const GroupActivity& group, const Operation& op, Milliseconds patience);

// A wait, and the lowest rank that is in it, if that is not this process.
struct Explained {
  status::Job::WaitElsewhere wait;
  std::optional<int64_t> first;
};

// Asks the job's processes which ranks are in the wait `text`, in which this process is, and for
// the places of the others. Returns nullopt if that is not known. Blocks. Raises the status's
// errors.
std::optional<Explained> explain(const std::string& text, Milliseconds patience);

// Serves the status of a process that has no group yet, and is known by `membership`, while a
// caller holds the result. Returns null as StatusServer::of() does.
std::shared_ptr<status::StatusServer> serveStatus(const status::Membership& membership);

// Sets the run's id, which the launcher gave this process, for the process's status.
void setRunId(const std::string& run);

}  // namespace torchcomms_pg
