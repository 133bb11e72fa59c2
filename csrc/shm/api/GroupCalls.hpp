// ncclGroupStart, ncclGroupEnd, and the path of an operation from its call to its stream.
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

// Launches an operation, or keeps it for the end of the calling thread's open group. Outside a
// group, an operation on the null stream has been executed when issue() returns. A transfer with
// `done` is launched at once even in a group, see PointToPoint::runIndependently. Throws NcclError.
void issue(IssuedOp operation);

// Open and close a group of the calling thread. Groups may be nested: the outermost groupEnd()
// launches all operations. If they have several communicators or streams, it launches none and
// throws NcclError with ncclInvalidUsage.
void groupStart();
void groupEnd();

// Returns whether the calling thread has a group open.
bool groupOpen();

// Throws NcclError if the calling thread has a group open: `operation` waits for the other ranks,
// and these may wait for the group's operations.
void checkNoGroup(const char* operation);

// Keeps `text` as this thread's last error. If the thread has a group open that has no error yet,
// also as the error that the group's end throws; it then launches nothing. Returns `result`.
ncclResult_t reportFailure(ncclResult_t result, const char* text) noexcept;

// Returns the text of this thread's last error.
const std::string& threadError();
void setThreadError(const std::string& text);

}  // namespace torchcomms_pg::shm
