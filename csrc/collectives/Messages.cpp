// Send and receive.
#include <utility>

#include "base/ExitGuard.hpp"
#include "collectives/Collectives.hpp"
#include "collectives/Tasks.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"
#include "operation/Types.hpp"

namespace torchcomms_pg::collectives {

namespace {

void checkTag(const char* what, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, what, ": tag ", tag, " is negative, wanted 0 or more");
}

// Makes the operation send the elements in `buffer` to `peer`, or receive them.
void setMessage(
    const Communicator& comm, PreparedOp& call, const Tensor& buffer, int peer, int tag) {
  call.op.peer = peer;
  call.op.tag = tag;
  call.op.ordered = !call.op.async || !comm.api().has(Feature::tags);
  const auto wire = wireType(buffer.scalar_type());
  call.task = Message{
      .sending = call.op.kind == OpKind::send,
      .buffer = buffer.data_ptr(),
      .count = buffer.numel() * wire.factor,
      .type = wire.type,
      .peer = peer == kAnyPeer ? peer : comm.inLibrary(peer),
      .tag = tag,
      // A send ends only when the message has been received, as Gloo's do: in some programs a rank
      // exits as soon as its sends have ended.
      .confirmed = comm.group().standsForGloo()};
}

}  // namespace

WorkPtr send(
    Communicator& comm, const Options& options, const Tensor& tensor, int destination, int tag) {
  auto call = comm.prepare(OpKind::send, options);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, tensor, comm.device());
  checkRank({what, "dst"}, destination, comm.size());
  checkTag(what, tag);
  const auto source = call.contiguous(tensor);
  call.setTensors({tensor}, {});
  setMessage(comm, call, source, destination, tag);
  call.buffers = {source};
  return comm.issue(std::move(call));
}

WorkPtr recv(
    Communicator& comm, const Options& options, const Tensor& tensor, int source, int tag) {
  auto call = comm.prepare(OpKind::recv, options);
  const char* const what = name(call.op.kind);
  checkOutput({what, "tensor"}, tensor, comm.device());
  checkTag(what, tag);
  if (source == kAnyPeer) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        comm.api().has(Feature::tags), what,
        ": a receive from any rank is not possible over NCCL; name the source");
  } else {
    checkRank({what, "src"}, source, comm.size());
  }
  call.setTensors({}, {tensor});
  OutputBuffer target(tensor);
  setMessage(comm, call, target.buffer(), source, tag);
  setCopyBack(call, target);
  return comm.issue(std::move(call));
}

}  // namespace torchcomms_pg::collectives
