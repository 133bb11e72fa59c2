// Collectives that move one tensor to or from every rank.
#include <utility>

#include "collectives/Collectives.hpp"
#include "collectives/Tasks.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"

namespace torchcomms_pg::collectives {

namespace {

std::vector<OutputBuffer> buffersOf(const Tensors& outputs) {
  std::vector<OutputBuffer> buffers;
  buffers.reserve(outputs.size());
  for (const auto& output : outputs) {
    buffers.emplace_back(output);
  }
  return buffers;
}

// Issues a gather of the ranks' `input`s on `root`. Only on the root does `target`, an OutputBuffer
// or OutputBuffers, have a value.
template <class Target>
WorkPtr issueGather(
    Communicator& comm, PreparedOp call, const Tensor& input, const std::optional<Target>& target,
    int root) {
  const auto source = call.contiguous(input);
  call.task = moving(
      CollectiveKind::gather, source.data_ptr(), target ? target->data() : nullptr, source.numel(),
      source.scalar_type(), root);
  if (target) {
    setCopyBack(call, *target);
  }
  return comm.issue(std::move(call));
}

}  // namespace

WorkPtr broadcast(Communicator& comm, const Options& options, const Tensor& tensor, int root) {
  auto call = comm.prepare(OpKind::broadcast, options);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, tensor, comm.device());
  checkRank({what, "root"}, root, comm.size());
  if (root != comm.rank()) {
    checkWritable({what, "tensor"}, tensor);
  }
  call.setTensors({tensor}, {tensor});
  call.op.peer = root;

  OutputBuffer target(tensor);
  if (root == comm.rank()) {
    call.fill(target);
  } else {
    setCopyBack(call, target);
  }
  call.task = moving(
      CollectiveKind::broadcast, target.data(), target.data(), tensor.numel(), tensor.scalar_type(),
      root);
  return comm.issue(std::move(call));
}

WorkPtr allGatherSingle(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input) {
  auto call = comm.prepare(OpKind::allGatherSingle, options);
  const char* const what = name(call.op.kind);
  checkPair(what, output, input, comm.device());
  checkNumel({what, "output"}, output, input.numel() * comm.size());
  call.setTensors({input}, {output});

  OutputBuffer target(output);
  const auto source = call.contiguous(input);
  call.task = moving(
      CollectiveKind::allGather, source.data_ptr(), target.data(), source.numel(),
      source.scalar_type());
  setCopyBack(call, target);
  return comm.issue(std::move(call));
}

WorkPtr allGather(
    Communicator& comm, const Options& options, const Tensors& outputs, const Tensor& input) {
  auto call = comm.prepare(OpKind::allGather, options);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, input, comm.device());
  checkListLength({what, "tensor_list"}, outputs.size(), comm.size());
  checkTensors({what, "tensor_list"}, outputs, input, comm.device());
  checkWritable({what, "tensor_list"}, outputs);
  checkNumel(Argument{what, "tensor_list"}[comm.rank()], outputs[comm.rank()], input.numel());
  call.setTensors({input}, outputs);

  const auto source = call.contiguous(input);
  if (sameNumel(outputs) && !comm.listsOneByOne()) {
    OutputBuffers targets(outputs);
    call.task = moving(
        CollectiveKind::allGather, source.data_ptr(), targets.data(), source.numel(),
        source.scalar_type());
    setCopyBack(call, targets);
    return comm.issue(std::move(call));
  }
  // Gathers by one broadcast from each rank, in one group.
  const auto targets = buffersOf(outputs);
  std::vector<Collective> parts;
  for (int root = 0; root < comm.size(); ++root) {
    const auto& target = targets[root];
    parts.push_back(moving(
        CollectiveKind::broadcast, root == comm.rank() ? source.data_ptr() : target.data(),
        target.data(), target.buffer().numel(), source.scalar_type(), root));
  }
  setGrouped(comm, call, std::move(parts));
  setCopyBack(call, targets);
  return comm.issue(std::move(call));
}

WorkPtr gather(
    Communicator& comm, const Options& options, const Tensors& outputs, const Tensor& input,
    int root) {
  auto call = comm.prepare(OpKind::gather, options);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, input, comm.device());
  checkRank({what, "root"}, root, comm.size());
  checkRootList(
      {what, "gather_list"}, outputs, input, root, comm.rank(), comm.size(), comm.device());
  checkWritable({what, "gather_list"}, outputs);
  call.setTensors({input}, outputs);
  call.op.peer = root;

  if (!comm.listsOneByOne()) {
    std::optional<OutputBuffers> targets;
    if (root == comm.rank()) {
      targets.emplace(outputs);
    }
    return issueGather(comm, std::move(call), input, targets, root);
  }
  const auto targets = buffersOf(outputs);
  const auto source = call.contiguous(input);
  std::vector<Part> receives;
  for (const auto& target : targets) {
    receives.push_back({target.data(), input.numel(), static_cast<int>(receives.size())});
  }
  setExchange(comm, call, {{source.data_ptr(), input.numel(), root}}, receives, call.op.dtype);
  setCopyBack(call, targets);
  return comm.issue(std::move(call));
}

WorkPtr gatherSingle(
    Communicator& comm, const Options& options, const std::optional<Tensor>& output,
    const Tensor& input, int root) {
  auto call = comm.prepare(OpKind::gatherSingle, options);
  const char* const what = name(call.op.kind);
  checkTensor({what, "input"}, input, comm.device());
  checkRank({what, "root"}, root, comm.size());
  Tensors outputs;
  std::optional<OutputBuffer> target;
  if (root == comm.rank()) {
    TORCH_CHECK_VALUE(
        output.has_value(), what, ": output is None on rank ", comm.rank(),
        ", the root; wanted a tensor");
    checkOutput({what, "output"}, *output, comm.device());
    checkSameType({what, "output"}, *output, "input", input);
    checkNumel({what, "output"}, *output, input.numel() * comm.size());
    outputs = {*output};
    target.emplace(*output);
  }
  call.setTensors({input}, outputs);
  call.op.peer = root;
  return issueGather(comm, std::move(call), input, target, root);
}

WorkPtr scatter(
    Communicator& comm, const Options& options, const Tensor& output, const Tensors& inputs,
    int root) {
  auto call = comm.prepare(OpKind::scatter, options);
  const char* const what = name(call.op.kind);
  checkOutput({what, "tensor"}, output, comm.device());
  checkRank({what, "root"}, root, comm.size());
  checkRootList(
      {what, "scatter_list"}, inputs, output, root, comm.rank(), comm.size(), comm.device());
  call.setTensors(inputs, {output});
  call.op.peer = root;

  OutputBuffer target(output);
  setCopyBack(call, target);
  if (comm.listsOneByOne()) {
    std::vector<Part> sends;
    for (const auto& input : inputs) {
      const auto source = call.contiguous(input);
      sends.push_back({source.data_ptr(), output.numel(), static_cast<int>(sends.size())});
    }
    setExchange(comm, call, sends, {{target.data(), output.numel(), root}}, call.op.dtype);
    return comm.issue(std::move(call));
  }
  const auto flat = root == comm.rank() ? call.flat(inputs) : Tensor();
  call.task = moving(
      CollectiveKind::scatter, flat.defined() ? flat.data_ptr() : nullptr, target.data(),
      output.numel(), output.scalar_type(), root);
  return comm.issue(std::move(call));
}

}  // namespace torchcomms_pg::collectives
