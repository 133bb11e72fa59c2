#include "shm/api/Api.hpp"

#include "shm/Host.hpp"
#include "shm/Window.hpp"
#include "shm/api/Group.hpp"
#include "shm/api/Management.hpp"
#include "shm/api/ResultCodes.hpp"
#include "shm/api/Validate.hpp"

namespace torchcomms_pg::shm {
namespace {

ncclResult_t collective(Collective c, ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  return withComm(handle, kindName(c.kind), [&](const std::shared_ptr<Comm>& comm) {
    comm->checkUsable();
    checkCollective(c, *comm);
    if (op != ncclSum) {
      try {
        c.op = comm->operators().resolve(op, c.type);
      } catch (const NcclError& failure) {
        invalidArgument(kindName(c.kind), failure.what());
      }
    }
    issue({comm, stream, c});
    return ncclSuccess;
  });
}

ncclResult_t transfer(
    bool sending, const Message& message, ncclComm_t handle, cudaStream_t stream) {
  const char* operation = sending ? "send" : "recv";
  return withComm(handle, operation, [&](const std::shared_ptr<Comm>& comm) {
    comm->checkUsable();
    checkType(operation, message.type);
    if (sending || message.peer != kAnyPeer) {
      checkRank(operation, "peer", message.peer, comm->size());
    }
    if (message.count > PTRDIFF_MAX / 8) {
      invalidArgument(
          operation, "count is " + std::to_string(message.count) + ", which no memory can hold");
    }
    checkBuffer(operation, sending ? "sendbuff" : "recvbuff", message.buffer, message.count);
    issue({comm, stream, std::make_shared<Transfer>(sending, message)});
    return ncclSuccess;
  });
}

ncclResult_t startGroup() {
  groupStart();
  return ncclSuccess;
}

ncclResult_t endGroup() {
  return guarded([] {
    groupEnd();
    return ncclSuccess;
  });
}

}  // namespace

const NcclApi& api() {
  static const NcclApi table = [] {
    NcclApi t;
    addManagement(t);
    addWindows(t);
    host::addCalls<collective, transfer>(t);
    t.groupStart = startGroup;
    t.groupEnd = endGroup;
    return t;
  }();
  return table;
}

}  // namespace torchcomms_pg::shm
