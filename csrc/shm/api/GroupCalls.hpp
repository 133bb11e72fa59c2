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

// Launches an operation, or in a group keeps it for the group's end. Outside a group, an operation
// on the null stream has been executed on return. A transfer with `done` is launched at once, see
// PointToPoint::runIndependently. Throws NcclError.
void issue(IssuedOp operation);

// A group has operations of one communicator on one stream. Otherwise its end throws
// ncclInvalidUsage, and launches nothing.
void groupStart();
void groupEnd();

// Returns whether the calling thread has a group open.
bool groupOpen();

// Throws NcclError inside a group: `operation` waits for the other ranks, which may wait for this
// group's operations.
void checkNoGroup(const char* operation);

// Records that a call inside a group has failed: the group's end throws this error, and launches
// nothing.
void deferError(ncclResult_t result, const std::string& text);

// Returns the text of this thread's last error.
const std::string& threadError();
void setThreadError(const std::string& text);

}  // namespace torchcomms_pg::shm
