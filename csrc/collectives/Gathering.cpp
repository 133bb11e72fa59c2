// Collectives that move one tensor to or from every rank.
#include <utility>

#include "collectives/Collectives.hpp"
#include "collectives/Exchange.hpp"
#include "nccl/Fallbacks.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"
#include "operation/Types.hpp"

namespace torchcomms_pg {

namespace {

std::vector<OutputBuffer> buffersOf(const std::vector<at::Tensor>& outputs) {
  std::vector<OutputBuffer> buffers;
  buffers.reserve(outputs.size());
  for (const auto& output : outputs) {
    buffers.emplace_back(output, /*readFirst=*/false);
  }
  return buffers;
}

void copyBack(const std::vector<OutputBuffer>& buffers) {
  for (const auto& buffer : buffers) {
    buffer.copyBack();
  }
}

// Issues the gathering of `input` on `root`, the only rank whose `target` (OutputBuffer or
// OutputBuffers) has a value.
template <class Target>
WorkPtr issueGather(
    Communicator& comm,
    PreparedOp call,
    const at::Tensor& input,
    const std::optional<Target>& target,
    int root) {
  const auto wire = wireType(input.scalar_type());
  call.launch = [&comm, target, wire, root, source = input.contiguous()](
                    ncclComm_t handle, cudaStream_t stream) {
    return gather(
        comm.api(),
        source.data_ptr(),
        target ? target->data() : nullptr,
        source.numel() * wire.factor,
        wire.type,
        root,
        handle,
        stream);
  };
  if (target && target->needsCopy()) {
    call.epilogue = [target] { target->copyBack(); };
  }
  return comm.issue(std::move(call));
}

}  // namespace

WorkPtr Collectives::broadcast(const at::Tensor& tensor, int root) {
  auto call = comm_.prepare(OpKind::broadcast, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, tensor, comm_.device());
  checkRank({what, "root"}, root, comm_.size());
  if (root != comm_.rank()) {
    checkWritable({what, "tensor"}, tensor);
  }
  call.setTensors({tensor}, {tensor});
  call.op.peer = root;

  const auto wire = wireType(tensor.scalar_type());
  OutputBuffer target(tensor, /*readFirst=*/root == comm_.rank());
  call.launch = [&comm = comm_, target, wire, root, count = tensor.numel() * wire.factor](
                    ncclComm_t handle, cudaStream_t stream) {
    return comm.api().broadcast(
        target.data(), target.data(), count, wire.type, root, handle, stream);
  };
  if (root != comm_.rank() && target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::allGatherSingle(const at::Tensor& output, const at::Tensor& input) {
  auto call = comm_.prepare(OpKind::allGatherSingle, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "output"}, output, comm_.device());
  checkWritable({what, "output"}, output);
  checkTensor({what, "input"}, input, comm_.device());
  checkSameType({what, "output"}, output, "input", input);
  checkNumel({what, "output"}, output, input.numel() * comm_.size());
  call.setTensors({input}, {output});

  const auto wire = wireType(input.scalar_type());
  OutputBuffer target(output, /*readFirst=*/false);
  call.launch = [&comm = comm_, target, wire, source = input.contiguous()](
                    ncclComm_t handle, cudaStream_t stream) {
    return comm.api().allGather(
        source.data_ptr(), target.data(), source.numel() * wire.factor, wire.type, handle, stream);
  };
  if (target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::allGather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) {
  auto call = comm_.prepare(OpKind::allGather, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, input, comm_.device());
  checkListLength({what, "tensor_list"}, outputs.size(), comm_.size());
  checkTensors({what, "tensor_list"}, outputs, input, comm_.device());
  checkWritable({what, "tensor_list"}, outputs);
  checkNumel(Argument{what, "tensor_list"}[comm_.rank()], outputs[comm_.rank()], input.numel());
  call.setTensors({input}, outputs);

  const auto wire = wireType(input.scalar_type());
  const auto source = input.contiguous();
  if (sameNumel(outputs) && !comm_.listsOneByOne()) {
    OutputBuffers targets(outputs);
    call.launch = [&comm = comm_, targets, wire, source](ncclComm_t handle, cudaStream_t stream) {
      return comm.api().allGather(
          source.data_ptr(),
          targets.data(),
          source.numel() * wire.factor,
          wire.type,
          handle,
          stream);
    };
    if (targets.needsCopy()) {
      call.epilogue = [targets] { targets.copyBack(); };
    }
    return comm_.issue(std::move(call));
  }
  // One broadcast from each rank, in one group.
  const auto targets = buffersOf(outputs);
  call.launch = [&comm = comm_, targets, wire, source](ncclComm_t handle, cudaStream_t stream) {
    return groupedByRoot(comm.api(), comm.size(), [&](int root) {
      const auto& target = targets[root];
      return comm.api().broadcast(
          root == comm.rank() ? source.data_ptr() : target.data(),
          target.data(),
          target.buffer().numel() * wire.factor,
          wire.type,
          root,
          handle,
          stream);
    });
  };
  call.epilogue = [targets] { copyBack(targets); };
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::gather(
    const std::vector<at::Tensor>& outputs, const at::Tensor& input, int root) {
  auto call = comm_.prepare(OpKind::gather, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, input, comm_.device());
  checkRank({what, "root"}, root, comm_.size());
  checkRootList(
      {what, "gather_list"}, outputs, input, root, comm_.rank(), comm_.size(), comm_.device());
  checkWritable({what, "gather_list"}, outputs);
  call.setTensors({input}, outputs);
  call.op.peer = root;

  if (!comm_.listsOneByOne()) {
    std::optional<OutputBuffers> targets;
    if (root == comm_.rank()) {
      targets.emplace(outputs);
    }
    return issueGather(comm_, std::move(call), input, targets, root);
  }
  const auto wire = wireType(input.scalar_type());
  const auto targets = buffersOf(outputs);
  call.launch = [&comm = comm_, targets, wire, root, source = input.contiguous()](
                    ncclComm_t handle, cudaStream_t stream) {
    const size_t count = source.numel() * wire.factor;
    std::vector<Part> receives;
    for (const auto& target : targets) {
      receives.push_back({target.data(), count, static_cast<int>(receives.size())});
    }
    return exchange(
        comm.api(), {{source.data_ptr(), count, root}}, receives, wire.type, handle, stream);
  };
  call.epilogue = [targets] { copyBack(targets); };
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::gatherSingle(
    const std::optional<at::Tensor>& output, const at::Tensor& input, int root) {
  auto call = comm_.prepare(OpKind::gatherSingle, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "input"}, input, comm_.device());
  checkRank({what, "root"}, root, comm_.size());
  std::vector<at::Tensor> outputs;
  std::optional<OutputBuffer> target;
  if (root == comm_.rank()) {
    TORCH_CHECK_VALUE(
        output.has_value(),
        what,
        ": output is None on rank ",
        comm_.rank(),
        ", the root; wanted a tensor");
    checkTensor({what, "output"}, *output, comm_.device());
    checkWritable({what, "output"}, *output);
    checkSameType({what, "output"}, *output, "input", input);
    checkNumel({what, "output"}, *output, input.numel() * comm_.size());
    outputs = {*output};
    target.emplace(*output, /*readFirst=*/false);
  }
  call.setTensors({input}, outputs);
  call.op.peer = root;
  return issueGather(comm_, std::move(call), input, target, root);
}

WorkPtr Collectives::scatter(
    const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root) {
  auto call = comm_.prepare(OpKind::scatter, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, output, comm_.device());
  checkWritable({what, "tensor"}, output);
  checkRank({what, "root"}, root, comm_.size());
  checkRootList(
      {what, "scatter_list"}, inputs, output, root, comm_.rank(), comm_.size(), comm_.device());
  call.setTensors(inputs, {output});
  call.op.peer = root;

  const auto wire = wireType(output.scalar_type());
  OutputBuffer target(output, /*readFirst=*/false);
  if (target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
  if (comm_.listsOneByOne()) {
    std::vector<at::Tensor> sources;
    for (const auto& input : inputs) {
      sources.push_back(input.contiguous());
    }
    call.launch = [&comm = comm_, target, wire, sources, root](
                      ncclComm_t handle, cudaStream_t stream) {
      const size_t count = target.buffer().numel() * wire.factor;
      std::vector<Part> sends;
      for (const auto& source : sources) {
        sends.push_back({source.data_ptr(), count, static_cast<int>(sends.size())});
      }
      return exchange(comm.api(), sends, {{target.data(), count, root}}, wire.type, handle, stream);
    };
    return comm_.issue(std::move(call));
  }
  const auto flat = root == comm_.rank() ? flatten(inputs) : at::Tensor();
  call.launch = [&comm = comm_, target, wire, flat, root](ncclComm_t handle, cudaStream_t stream) {
    return torchcomms_pg::scatter(
        comm.api(),
        flat.defined() ? flat.data_ptr() : nullptr,
        target.data(),
        target.buffer().numel() * wire.factor,
        wire.type,
        root,
        handle,
        stream);
  };
  return comm_.issue(std::move(call));
}

}  // namespace torchcomms_pg
