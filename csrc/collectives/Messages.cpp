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

// Returns whether a send ends only when the message has been received, as Gloo's do: in some
// programs a rank exits as soon as its sends have ended.
bool confirms(const Communicator& comm) {
  return comm.group().standsForGloo();
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
  call.op.peer = destination;
  call.op.tag = tag;
  call.op.ordered = !options.async || !comm.api().has(Feature::tags);

  const auto wire = wireType(tensor.scalar_type());
  call.task = Message{
      .sending = true,
      .buffer = source.data_ptr(),
      .count = source.numel() * wire.factor,
      .type = wire.type,
      .peer = comm.inLibrary(destination),
      .tag = tag,
      .confirmed = confirms(comm)};
  call.buffers = {source};
  return comm.issue(std::move(call));
}

WorkPtr recv(
    Communicator& comm, const Options& options, const Tensor& tensor, int source, int tag) {
  auto call = comm.prepare(OpKind::recv, options);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, tensor, comm.device());
  checkWritable({what, "tensor"}, tensor);
  checkTag(what, tag);
  if (source == kAnyPeer) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        comm.api().has(Feature::tags), what,
        ": a receive from any rank is not possible over NCCL; name the source");
  } else {
    checkRank({what, "src"}, source, comm.size());
  }
  call.setTensors({}, {tensor});
  call.op.peer = source;
  call.op.tag = tag;
  call.op.ordered = !options.async || !comm.api().has(Feature::tags);

  const auto wire = wireType(tensor.scalar_type());
  OutputBuffer target(tensor);
  call.task = Message{
      .buffer = target.data(),
      .count = tensor.numel() * wire.factor,
      .type = wire.type,
      .peer = source == kAnyPeer ? source : comm.inLibrary(source),
      .tag = tag,
      .confirmed = confirms(comm)};
  setCopyBack(call, target);
  return comm.issue(std::move(call));
}

}  // namespace torchcomms_pg::collectives
