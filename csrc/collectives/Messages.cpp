// Send and receive.
#include <utility>

#include "base/ExitGuard.hpp"
#include "collectives/Collectives.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"
#include "operation/Types.hpp"

namespace torchcomms_pg {

namespace {

void checkTag(const char* what, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, what, ": tag ", tag, " is negative, wanted 0 or more");
}

// Returns whether a send ends only when the message has been received, as over Gloo: some programs'
// ranks exit as soon as their sends have ended.
bool confirms(const Communicator& comm) {
  return comm.group().backend == "gloo";
}

}  // namespace

WorkPtr Collectives::send(const at::Tensor& tensor, int destination, int tag) {
  auto call = comm_.prepare(OpKind::send, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, tensor, comm_.device());
  checkRank({what, "dst"}, destination, comm_.size());
  checkTag(what, tag);
  auto source = tensor.contiguous();
  call.setTensors({tensor}, {});
  call.op.peer = destination;
  call.op.tag = tag;
  call.op.ordered = !options_.async || comm_.api().sendTagged == nullptr;

  const auto wire = wireType(tensor.scalar_type());
  const size_t count = source.numel() * wire.factor;
  const int peer = comm_.inLibrary(destination);
  call.message = Message{source.data_ptr(), count, wire.type, peer, tag};
  call.message->confirmed = confirms(comm_);
  call.launch = [&comm = comm_, source, sent = *call.message](
                    ncclComm_t handle, cudaStream_t stream) {
    return moveMessage(comm.api(), /*sending=*/true, sent, handle, stream);
  };
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::recv(const at::Tensor& tensor, int source, int tag) {
  auto call = comm_.prepare(OpKind::recv, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, tensor, comm_.device());
  checkWritable({what, "tensor"}, tensor);
  checkTag(what, tag);
  if (source == kAnyPeer) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        comm_.api().recvTagged != nullptr,
        what,
        ": a receive from any rank is not possible over NCCL; name the source");
  } else {
    checkRank({what, "src"}, source, comm_.size());
  }
  call.setTensors({}, {tensor});
  call.op.peer = source;
  call.op.tag = tag;
  call.op.ordered = !options_.async || comm_.api().sendTagged == nullptr;

  const auto wire = wireType(tensor.scalar_type());
  OutputBuffer target(tensor, /*readFirst=*/false);
  const int peer = source == kAnyPeer ? source : comm_.inLibrary(source);
  call.message = Message{target.data(), tensor.numel() * wire.factor, wire.type, peer, tag};
  call.message->confirmed = confirms(comm_);
  call.launch = [&comm = comm_, target, received = *call.message](
                    ncclComm_t handle, cudaStream_t stream) {
    return moveMessage(comm.api(), /*sending=*/false, received, handle, stream);
  };
  // The closure also keeps the buffer alive if no stream orders the message.
  call.epilogue = [target] { target.copyBack(); };
  return comm_.issue(std::move(call));
}

ncclResult_t moveMessage(
    const NcclApi& api,
    bool sending,
    const Message& message,
    ncclComm_t comm,
    cudaStream_t stream) {
  if (api.sendTagged != nullptr) {
    return sending ? api.sendTagged(message, comm, stream) : api.recvTagged(message, comm, stream);
  }
  // NCCL matches the messages of a pair by their order alone.
  return sending
             ? api.send(message.buffer, message.count, message.type, message.peer, comm, stream)
             : api.recv(message.buffer, message.count, message.type, message.peer, comm, stream);
}

}  // namespace torchcomms_pg
