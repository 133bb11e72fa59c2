// An operation that has been checked and described, but not launched.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "nccl/Library.hpp"
#include "operation/Buffers.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

// Pairs of a buffer and the tensor to copy into it.
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

inline void copyInputs(const Copies& copies) {
  if (copies.empty()) {
    return;
  }
  at::AutoDispatchBelowAutograd guard;
  for (const auto& [buffer, tensor] : copies) {
    const WritePermission permission(buffer);
    buffer.copy_(tensor);
  }
}

// Runs the epilogue of an operation, if it has one.
inline void runEpilogue(const std::function<void()>& epilogue) {
  if (epilogue) {
    at::AutoDispatchBelowAutograd guard;
    epilogue();
  }
}

struct PreparedOp {
  using Calls = std::function<ncclResult_t(ncclComm_t comm, cudaStream_t stream)>;

  Operation op;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  // What the library does: several calls, one collective or one message. Contains addresses of the
  // tensors' memory, taken when the caller passed the tensors. So no tensor's memory may move
  // before the launch; a batch is launched when the batch ends.
  std::variant<Calls, Collective, Message> task;
  // Tensors whose memory `task` uses and no other member keeps.
  std::vector<at::Tensor> buffers;
  // The copies that copyInputs() makes into contiguous buffers of `task`: before the launch, in the
  // order of the stream, since earlier operations may still write to the copied tensors.
  Copies copies;
  // Runs after `task`, in the order of the stream: copies results or reduces locally. May be null.
  std::function<void()> epilogue;
  std::vector<PreparedOp> parts;                     // a batch's operations if all are messages
  std::shared_ptr<std::vector<PreparedOp>> members;  // a batch's operations; null if not ordered
  // Streams of an accelerator. For a batch: streams that go on after the batch, besides the one in
  // which it runs. For a member of a batch: the stream in which the member was issued.
  std::vector<c10::Stream> streams;
  std::vector<int64_t> ranks;  // ranks of the new group of a split or shrink, for hooks
  std::string newName;

  bool isMessage() const { return std::holds_alternative<Message>(task); }

  // Makes the library execute `task` in the order of `stream`, and returns the library's result.
  ncclResult_t launch(const Library& api, ncclComm_t comm, cudaStream_t stream) const {
    if (const auto* const collective = std::get_if<Collective>(&task)) {
      return api.run(*collective, comm, stream);
    }
    if (const auto* const message = std::get_if<Message>(&task)) {
      return api.run(*message, comm, stream);
    }
    return std::get<Calls>(task)(comm, stream);
  }

  // Returns `tensor` if it is contiguous, or else a buffer that copyInputs() fills with its
  // elements.
  at::Tensor contiguous(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) {
      return tensor;
    }
    auto buffer = at::empty_like(tensor, at::MemoryFormat::Contiguous);
    copies.emplace_back(buffer, tensor);
    return buffer;
  }

  // Returns one tensor with the elements of all `tensors`: in their own memory if they are
  // adjacent, otherwise in a buffer that copyInputs() fills.
  at::Tensor flat(const std::vector<at::Tensor>& tensors) {
    if (adjacent(tensors)) {
      return tensors.front().as_strided({totalNumel(tensors)}, {1});
    }
    auto buffer = at::empty({totalNumel(tensors)}, tensors.front().options());
    int64_t offset = 0;
    for (const auto& tensor : tensors) {
      copies.emplace_back(buffer.narrow(0, offset, tensor.numel()).view(tensor.sizes()), tensor);
      offset += tensor.numel();
    }
    return buffer;
  }

  // Makes copyInputs() copy the tensor of `target` into its buffer, if `target` has a buffer.
  void fill(const OutputBuffer& target) {
    if (target.needsCopy()) {
      copies.emplace_back(target.buffer(), target.tensor());
    }
  }

  // Returns whether the ranks' parts differ in size, or may do so because of splits.
  bool uneven() const {
    switch (op.kind) {
      case OpKind::allGather: return !sameNumel(outputs);
      case OpKind::reduceScatter: return !sameNumel(inputs);
      case OpKind::allToAllSingle: return !op.inputSplits.empty() || !op.outputSplits.empty();
      default: return false;
    }
  }

  // Sets the tensors, and the fields of `op` that describe them. `in` or `out` must have a tensor.
  void setTensors(
      std::vector<at::Tensor> in, std::vector<at::Tensor> out, const char* reduceOp = nullptr) {
    op.numelIn = totalNumel(in);
    op.numelOut = totalNumel(out);
    op.dtype = (in.empty() ? out : in).front().scalar_type();
    op.bytes = std::max(op.numelIn, op.numelOut) * static_cast<int64_t>(c10::elementSize(op.dtype));
    op.reduceOp = reduceOp;
    inputs = std::move(in);
    outputs = std::move(out);
  }
};

}  // namespace torchcomms_pg
