// Collectives that move one tensor to or from every rank.
#include <utility>

#include "collectives/Collectives.hpp"
#include "collectives/Tasks.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"
#include "operation/Types.hpp"

namespace torchcomms_pg {

namespace {

std::vector<OutputBuffer> buffersOf(const std::vector<at::Tensor>& outputs) {
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
    Communicator& comm,
    PreparedOp call,
    const at::Tensor& input,
    const std::optional<Target>& target,
    int root) {
  const auto wire = wireType(input.scalar_type());
  const auto source = call.contiguous(input);
  call.task = Collective{
      .kind = CollectiveKind::gather,
      .input = source.data_ptr(),
      .output = target ? target->data() : nullptr,
      .count = source.numel() * wire.factor,
      .type = wire.type,
      .root = root};
  if (target) {
    setCopyBack(call, *target);
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
  OutputBuffer target(tensor);
  if (root == comm_.rank()) {
    call.fill(target);
  }
  call.task = Collective{
      .kind = CollectiveKind::broadcast,
      .input = target.data(),
      .output = target.data(),
      .count = tensor.numel() * wire.factor,
      .type = wire.type,
      .root = root};
  if (root != comm_.rank()) {
    setCopyBack(call, target);
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
  OutputBuffer target(output);
  const auto source = call.contiguous(input);
  call.task = Collective{
      .kind = CollectiveKind::allGather,
      .input = source.data_ptr(),
      .output = target.data(),
      .count = source.numel() * wire.factor,
      .type = wire.type};
  setCopyBack(call, target);
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
  const auto source = call.contiguous(input);
  if (sameNumel(outputs) && !comm_.listsOneByOne()) {
    OutputBuffers targets(outputs);
    call.task = Collective{
        .kind = CollectiveKind::allGather,
        .input = source.data_ptr(),
        .output = targets.data(),
        .count = source.numel() * wire.factor,
        .type = wire.type};
    setCopyBack(call, targets);
    return comm_.issue(std::move(call));
  }
  // Gathers by one broadcast from each rank, in one group.
  const auto targets = buffersOf(outputs);
  std::vector<Collective> parts;
  for (int root = 0; root < comm_.size(); ++root) {
    const auto& target = targets[root];
    parts.push_back(
        {.kind = CollectiveKind::broadcast,
         .input = root == comm_.rank() ? source.data_ptr() : target.data(),
         .output = target.data(),
         .count = target.buffer().numel() * wire.factor,
         .type = wire.type,
         .root = root});
  }
  setGrouped(comm_, call, std::move(parts));
  setCopyBack(call, targets);
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
  const auto source = call.contiguous(input);
  const size_t count = source.numel() * wire.factor;
  std::vector<Part> receives;
  for (const auto& target : targets) {
    receives.push_back({target.data(), count, static_cast<int>(receives.size())});
  }
  setExchange(comm_, call, {{source.data_ptr(), count, root}}, std::move(receives), wire.type);
  setCopyBack(call, targets);
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
    target.emplace(*output);
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
  OutputBuffer target(output);
  const size_t count = target.buffer().numel() * wire.factor;
  setCopyBack(call, target);
  if (comm_.listsOneByOne()) {
    std::vector<Part> sends;
    for (const auto& input : inputs) {
      const auto source = call.contiguous(input);
      sends.push_back({source.data_ptr(), count, static_cast<int>(sends.size())});
    }
    setExchange(comm_, call, std::move(sends), {{target.data(), count, root}}, wire.type);
    return comm_.issue(std::move(call));
  }
  const auto flat = root == comm_.rank() ? call.flat(inputs) : at::Tensor();
  call.task = Collective{
      .kind = CollectiveKind::scatter,
      .input = flat.defined() ? flat.data_ptr() : nullptr,
      .output = target.data(),
      .count = count,
      .type = wire.type,
      .root = root};
  return comm_.issue(std::move(call));
}

}  // namespace torchcomms_pg
