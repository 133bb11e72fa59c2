// The status of this process, for python -m torchcomms_pg.status: what its groups do, told by a
// server of its own and by way of the job's store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <string>

#include "comm/GroupActivity.hpp"
#include "status/Hosts.hpp"
#include "status/StatusServer.hpp"

namespace torchcomms_pg {

// Has a group told of in the status of this process, as long as it is held and the group is open. A
// process with none has no status.
class StatusPart {
 public:
  // `store`: the group's own part of the job's store. `severalHosts`: its ranks may be on more than
  // one. Null: there is to be no status, or there can be none, which is said on stderr.
  static std::unique_ptr<StatusPart> begin(
      const std::shared_ptr<GroupActivity>& group,
      const c10::intrusive_ptr<c10d::Store>& store,
      bool severalHosts);

 private:
  std::shared_ptr<status::StatusServer> server_;
  std::shared_ptr<status::Hosts> hosts_;  // null: all ranks are on this host
};

// Names the run that a launcher gave this process, for its status.
void setRunId(const std::string& run);

}  // namespace torchcomms_pg
