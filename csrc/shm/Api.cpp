#include "shm/Api.hpp"

#include "shm/Boundary.hpp"
#include "shm/Group.hpp"
#include "shm/Management.hpp"
#include "shm/Names.hpp"
#include "shm/Validate.hpp"
#include "shm/Window.hpp"

namespace torchcomms_pg::shm {
namespace {

ncclResult_t collective(Collective c, ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  return withComm(handle, kindName(c.kind), [&](const std::shared_ptr<Comm>& comm) {
    comm->checkUsable();
    checkCollective(c, *comm);
    if (op != ncclSum) {
      try {
        c.op = comm->resolveOperator(op, c.type);
      } catch (const Failure& failure) {
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
    auto transfer = std::make_shared<Transfer>();
    transfer->sending = sending;
    transfer->buffer = message.buffer;
    transfer->count = message.count;
    transfer->type = message.type;
    transfer->peer = message.peer;
    transfer->tag = message.tag;
    transfer->confirmed = message.confirmed;
    transfer->done = message.done;
    transfer->context = message.context;
    issue({comm, stream, std::move(transfer)});
    return ncclSuccess;
  });
}

ncclResult_t allReduce(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective({CollectiveKind::allReduce, in, out, count, type, {}, 0}, op, comm, stream);
}

ncclResult_t allGather(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective(
      {CollectiveKind::allGather, in, out, count, type, {}, 0}, ncclSum, comm, stream);
}

ncclResult_t reduceScatter(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective({CollectiveKind::reduceScatter, in, out, count, type, {}, 0}, op, comm, stream);
}

ncclResult_t broadcast(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective(
      {CollectiveKind::broadcast, in, out, count, type, {}, root}, ncclSum, comm, stream);
}

ncclResult_t reduceToRoot(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclRedOp_t op,
    int root,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective({CollectiveKind::reduce, in, out, count, type, {}, root}, op, comm, stream);
}

ncclResult_t allToAll(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective({CollectiveKind::allToAll, in, out, count, type, {}, 0}, ncclSum, comm, stream);
}

ncclResult_t gather(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective(
      {CollectiveKind::gather, in, out, count, type, {}, root}, ncclSum, comm, stream);
}

ncclResult_t scatter(
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream) {
  return collective(
      {CollectiveKind::scatter, in, out, count, type, {}, root}, ncclSum, comm, stream);
}

ncclResult_t barrier(ncclComm_t comm, cudaStream_t stream) {
  return collective(
      {CollectiveKind::barrier, nullptr, nullptr, 0, ncclInt8, {}, 0}, ncclSum, comm, stream);
}

ncclResult_t send(
    const void* buffer,
    size_t count,
    ncclDataType_t type,
    int peer,
    ncclComm_t comm,
    cudaStream_t stream) {
  return transfer(
      true,
      {.buffer = const_cast<void*>(buffer), .count = count, .type = type, .peer = peer},
      comm,
      stream);
}

ncclResult_t recv(
    void* buffer,
    size_t count,
    ncclDataType_t type,
    int peer,
    ncclComm_t comm,
    cudaStream_t stream) {
  return transfer(
      false, {.buffer = buffer, .count = count, .type = type, .peer = peer}, comm, stream);
}

ncclResult_t sendTagged(const Message& message, ncclComm_t comm, cudaStream_t stream) {
  return transfer(true, message, comm, stream);
}

ncclResult_t recvTagged(const Message& message, ncclComm_t comm, cudaStream_t stream) {
  return transfer(false, message, comm, stream);
}

ncclResult_t startGroup() {
  groupStart();
  return ncclSuccess;
}

ncclResult_t endGroup() {
  return guarded(nullptr, [] { return groupEnd(); });
}

}  // namespace

const NcclApi& api() {
  static const NcclApi table = [] {
    NcclApi t;
    addManagement(t);
    addWindows(t);
    t.allReduce = allReduce;
    t.allGather = allGather;
    t.reduceScatter = reduceScatter;
    t.broadcast = broadcast;
    t.reduce = reduceToRoot;
    t.allToAll = allToAll;
    t.gather = gather;
    t.scatter = scatter;
    t.send = send;
    t.recv = recv;
    t.groupStart = startGroup;
    t.groupEnd = endGroup;
    t.barrier = barrier;
    t.sendTagged = sendTagged;
    t.recvTagged = recvTagged;
    return t;
  }();
  return table;
}

}  // namespace torchcomms_pg::shm
