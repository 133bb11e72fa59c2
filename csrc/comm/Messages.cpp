// Send and receive.
#include <ATen/core/LegacyTypeDispatch.h>

#include <memory>
#include <span>
#include <utility>

#include "comm/Buffers.hpp"
#include "comm/Checks.hpp"
#include "comm/Communicator.hpp"
#include "comm/Recording.hpp"
#include "comm/Types.hpp"
#include "device/Unfinished.hpp"

namespace torchcomms_pg {

namespace {

void checkTag(const char* what, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, what, ": tag ", tag, " is negative, wanted 0 or more");
}

}  // namespace

WorkPtr Communicator::send(
    const at::Tensor& tensor, int destination, int tag, const Options& options) {
  auto call = newCall(OpKind::send, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", tensor, device());
  checkRank(what, "dst", destination, size_);
  checkTag(what, tag);
  auto source = tensor.contiguous();
  describeTensors(call, {source}, {});
  call.op.peer = destination;
  call.op.tag = tag;
  call.op.ordered = !options.async || api_.sendTagged == nullptr;

  const auto wire = wireType(tensor.scalar_type());
  const size_t count = source.numel() * wire.factor;
  call.message = Message{source.data_ptr(), count, wire.type, destination, tag};
  // As over Gloo: there are programs whose ranks leave once their messages have been sent.
  call.message->confirmed = group().backend == "gloo";
  call.launch = [this, source, sent = *call.message](ncclComm_t comm, cudaStream_t stream) {
    return message(/*sending=*/true, sent, comm, stream);
  };
  return issue(std::move(call));
}

WorkPtr Communicator::recv(const at::Tensor& tensor, int source, int tag, const Options& options) {
  auto call = newCall(OpKind::recv, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", tensor, device());
  checkWritable(what, "tensor", tensor);
  checkTag(what, tag);
  if (source == kAnyPeer) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        api_.recvTagged != nullptr,
        what,
        ": a receive from any rank is not possible over NCCL; name the source");
  } else {
    checkRank(what, "src", source, size_);
  }
  describeTensors(call, {}, {tensor});
  call.op.peer = source;
  call.op.tag = tag;
  call.op.ordered = !options.async || api_.sendTagged == nullptr;

  const auto wire = wireType(tensor.scalar_type());
  Target target(tensor, /*readFirst=*/false);
  call.message = Message{target.data(), tensor.numel() * wire.factor, wire.type, source, tag};
  call.launch = [this, target, received = *call.message](ncclComm_t comm, cudaStream_t stream) {
    return message(/*sending=*/false, received, comm, stream);
  };
  // Keeps the buffer alive too, when the message is ordered by no stream.
  call.after = [target] { target.copyBack(); };
  return issue(std::move(call));
}

ncclResult_t Communicator::message(
    bool sending, const Message& message, ncclComm_t comm, cudaStream_t stream) {
  if (api_.sendTagged != nullptr) {
    return sending ? api_.sendTagged(message, comm, stream)
                   : api_.recvTagged(message, comm, stream);
  }
  // NCCL matches the messages of a pair by their order alone.
  return sending
             ? api_.send(message.buffer, message.count, message.type, message.peer, comm, stream)
             : api_.recv(message.buffer, message.count, message.type, message.peer, comm, stream);
}

// Messages that no stream orders wait for nothing but their other sides.
void Communicator::runMessages(Call& call, const WorkPtr& work) {
  // Shared by the messages of one Work: the last to end finishes it.
  struct Pending {
    Communicator* comm;
    WorkPtr work;  // keeps the communicator
    InFlightList::iterator entry;
    std::mutex mutex;
    size_t left;
    std::exception_ptr error;

    void end(std::exception_ptr cause, size_t count) {
      {
        std::lock_guard lock(mutex);
        if (cause && !error) {
          error = std::move(cause);
        }
        left -= count;
        if (left > 0) {
          return;
        }
      }
      comm->finish(work, entry, error);
    }
  };
  struct One {
    Unfinished unfinished;
    std::shared_ptr<Pending> pending;
    std::function<void()> after;

    static void done(void* context, ncclResult_t result, int peer) noexcept {
      const std::unique_ptr<One> self(static_cast<One*>(context));
      auto& pending = *self->pending;
      std::exception_ptr error;
      try {
        if (result != ncclSuccess) {
          error = pending.comm->resultError(pending.work->operation(), result);
        } else {
          pending.work->setSource(peer);
          if (self->after) {
            at::AutoDispatchBelowAutograd guard;
            self->after();
          }
        }
      } catch (...) {
        error = std::current_exception();
      }
      pending.end(error, 1);
    }
  };

  const std::span<Call> calls =
      call.parts.empty() ? std::span<Call>(&call, 1) : std::span<Call>(call.parts);
  auto pending = std::make_shared<Pending>();
  pending->comm = this;
  pending->work = work;
  pending->left = calls.size();
  pending->entry = enter(work->operation(), work);
  work->setStarted(Clock::now());
  size_t launched = 0;
  try {
    awaitInitialization();
    if (call.op.recording) {
      call.op.recording->start();
    }
    auto* const comm = usable();
    for (auto& part : calls) {
      auto message = *part.message;
      auto one = std::make_unique<One>(One{{}, pending, std::move(part.after)});
      message.done = One::done;
      message.context = one.get();
      const auto result = part.op.kind == OpKind::send ? api_.sendTagged(message, comm, nullptr)
                                                       : api_.recvTagged(message, comm, nullptr);
      if (result != ncclSuccess) {
        const auto raised = interruption();  // the first message may wait for connections
        std::rethrow_exception(raised ? raised : resultError(part.op, result));
      }
      one.release();  // done() has it now
      ++launched;
    }
  } catch (...) {
    pending->end(std::current_exception(), calls.size() - launched);
    throw;
  }
}

}  // namespace torchcomms_pg
