// ncclGroupStart and ncclGroupEnd, and the path of operations from the call to their stream.
#pragma once

#include <nccl.h>

#include <memory>
#include <variant>

#include "shm/Comm.hpp"

namespace torchcomms_pg::shm {

// One operation of one communicator.
struct IssuedOp {
  std::shared_ptr<Comm> comm;
  cudaStream_t stream;
  std::variant<Collective, std::shared_ptr<Transfer>, Put, SignalWait> what;
};

// Launches an operation or, in a group, keeps it for the group's end. Throws NcclError; on the null
// stream outside a group the operation has been executed on return. A transfer with `done` is
// launched at once, see PointToPoint::runIndependently.
void issue(IssuedOp operation);

// A group has operations of one communicator on one stream. Its end refuses others with
// ncclInvalidUsage, and then launches nothing.
void groupStart();
void groupEnd();

// Throws NcclError inside a group: `operation` waits for the other ranks, as a group's end does.
void checkNoGroup(const char* operation);

// Notes that a call inside a group has failed: the group's end returns that, and launches nothing.
void deferError(ncclResult_t result, const std::string& text);

// Returns the text of this thread's last error.
const std::string& threadError();
void setThreadError(const std::string& text);

}  // namespace torchcomms_pg::shm
