// The collectives that move one tensor to or from every rank.
#include <utility>

#include "comm/Buffers.hpp"
#include "comm/Checks.hpp"
#include "comm/Communicator.hpp"
#include "comm/Types.hpp"
#include "nccl/Fallbacks.hpp"

namespace torchcomms_pg {

WorkPtr Communicator::broadcast(const at::Tensor& tensor, int root, const Options& options) {
  auto call = newCall(OpKind::broadcast, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", tensor, device());
  checkRank(what, "root", root, size_);
  if (root != rank_) {
    checkWritable(what, "tensor", tensor);
  }
  describeTensors(call, {tensor}, {tensor});
  call.op.peer = root;

  const auto wire = wireType(tensor.scalar_type());
  Target target(tensor, /*readFirst=*/root == rank_);
  call.launch = [this, target, wire, root, count = tensor.numel() * wire.factor](
                    ncclComm_t comm, cudaStream_t stream) {
    return api_.broadcast(target.data(), target.data(), count, wire.type, root, comm, stream);
  };
  if (root != rank_ && target.needsCopy()) {
    call.after = [target] { target.copyBack(); };
  }
  return issue(std::move(call));
}

WorkPtr Communicator::allGatherSingle(
    const at::Tensor& output, const at::Tensor& input, const Options& options) {
  auto call = newCall(OpKind::allGatherSingle, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "output", output, device());
  checkWritable(what, "output", output);
  checkTensor(what, "input", input, device());
  checkSameType(what, "output", output, "input", input);
  checkNumel(what, "output", output, input.numel() * size_);
  describeTensors(call, {input}, {output});

  const auto wire = wireType(input.scalar_type());
  Target target(output, /*readFirst=*/false);
  call.launch = [this, target, wire, source = input.contiguous()](
                    ncclComm_t comm, cudaStream_t stream) {
    return api_.allGather(
        source.data_ptr(), target.data(), source.numel() * wire.factor, wire.type, comm, stream);
  };
  if (target.needsCopy()) {
    call.after = [target] { target.copyBack(); };
  }
  return issue(std::move(call));
}

WorkPtr Communicator::allGather(
    const std::vector<at::Tensor>& outputs, const at::Tensor& input, const Options& options) {
  auto call = newCall(OpKind::allGather, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", input, device());
  checkListLength(what, "tensor_list", outputs.size(), size_);
  checkTensors(what, "tensor_list", outputs, input, device());
  checkWritable(what, "tensor_list", outputs);
  checkNumel(
      what, ("tensor_list[" + std::to_string(rank_) + "]").c_str(), outputs[rank_], input.numel());
  describeTensors(call, {input}, outputs);

  const auto wire = wireType(input.scalar_type());
  const auto source = input.contiguous();
  if (sameNumel(outputs)) {
    TargetList targets(outputs);
    call.launch = [this, targets, wire, source](ncclComm_t comm, cudaStream_t stream) {
      return api_.allGather(
          source.data_ptr(), targets.data(), source.numel() * wire.factor, wire.type, comm, stream);
    };
    if (targets.needsCopy()) {
      call.after = [targets] { targets.copyBack(); };
    }
    return issue(std::move(call));
  }
  // Different sizes: one broadcast from each rank, in one group.
  std::vector<Target> targets;
  for (const auto& output : outputs) {
    targets.emplace_back(output, /*readFirst=*/false);
  }
  call.launch = [this, targets, wire, source](ncclComm_t comm, cudaStream_t stream) {
    return grouped(api_, [&] {
      for (int root = 0; root < size_; ++root) {
        const auto& target = targets[root];
        const auto result = api_.broadcast(
            root == rank_ ? source.data_ptr() : target.data(),
            target.data(),
            target.buffer().numel() * wire.factor,
            wire.type,
            root,
            comm,
            stream);
        if (result != ncclSuccess) {
          return result;
        }
      }
      return ncclSuccess;
    });
  };
  call.after = [targets] {
    for (const auto& target : targets) {
      target.copyBack();
    }
  };
  return issue(std::move(call));
}

WorkPtr Communicator::gather(
    const std::vector<at::Tensor>& outputs,
    const at::Tensor& input,
    int root,
    const Options& options) {
  auto call = newCall(OpKind::gather, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", input, device());
  checkRank(what, "root", root, size_);
  checkRootList(what, "gather_list", outputs, input, root, rank_, size_, device());
  checkWritable(what, "gather_list", outputs);
  describeTensors(call, {input}, outputs);
  call.op.peer = root;

  const auto wire = wireType(input.scalar_type());
  const auto source = input.contiguous();
  std::optional<TargetList> targets;
  if (root == rank_) {
    targets.emplace(outputs);
  }
  call.launch = [this, targets, wire, source, root](ncclComm_t comm, cudaStream_t stream) {
    return torchcomms_pg::gather(
        api_,
        source.data_ptr(),
        targets ? targets->data() : nullptr,
        source.numel() * wire.factor,
        wire.type,
        root,
        comm,
        stream);
  };
  if (targets && targets->needsCopy()) {
    call.after = [targets] { targets->copyBack(); };
  }
  return issue(std::move(call));
}

WorkPtr Communicator::gatherSingle(
    const std::optional<at::Tensor>& output,
    const at::Tensor& input,
    int root,
    const Options& options) {
  auto call = newCall(OpKind::gatherSingle, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "input", input, device());
  checkRank(what, "root", root, size_);
  std::vector<at::Tensor> outputs;
  std::optional<Target> target;
  if (root == rank_) {
    TORCH_CHECK_VALUE(
        output.has_value(),
        what,
        ": output is None on rank ",
        rank_,
        ", the root; wanted a tensor");
    checkTensor(what, "output", *output, device());
    checkWritable(what, "output", *output);
    checkSameType(what, "output", *output, "input", input);
    checkNumel(what, "output", *output, input.numel() * size_);
    outputs = {*output};
    target.emplace(*output, /*readFirst=*/false);
  }
  describeTensors(call, {input}, outputs);
  call.op.peer = root;

  const auto wire = wireType(input.scalar_type());
  call.launch = [this, target, wire, root, source = input.contiguous()](
                    ncclComm_t comm, cudaStream_t stream) {
    return torchcomms_pg::gather(
        api_,
        source.data_ptr(),
        target ? target->data() : nullptr,
        source.numel() * wire.factor,
        wire.type,
        root,
        comm,
        stream);
  };
  if (target && target->needsCopy()) {
    call.after = [target] { target->copyBack(); };
  }
  return issue(std::move(call));
}

WorkPtr Communicator::scatter(
    const at::Tensor& output,
    const std::vector<at::Tensor>& inputs,
    int root,
    const Options& options) {
  auto call = newCall(OpKind::scatter, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", output, device());
  checkWritable(what, "tensor", output);
  checkRank(what, "root", root, size_);
  checkRootList(what, "scatter_list", inputs, output, root, rank_, size_, device());
  describeTensors(call, inputs, {output});
  call.op.peer = root;

  const auto wire = wireType(output.scalar_type());
  Target target(output, /*readFirst=*/false);
  const auto flat = root == rank_ ? flatten(inputs) : at::Tensor();
  call.launch = [this, target, wire, flat, root](ncclComm_t comm, cudaStream_t stream) {
    return torchcomms_pg::scatter(
        api_,
        flat.defined() ? flat.data_ptr() : nullptr,
        target.data(),
        target.buffer().numel() * wire.factor,
        wire.type,
        root,
        comm,
        stream);
  };
  if (target.needsCopy()) {
    call.after = [target] { target.copyBack(); };
  }
  return issue(std::move(call));
}

}  // namespace torchcomms_pg
