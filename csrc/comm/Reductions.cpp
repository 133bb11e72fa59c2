// The collectives that reduce.
#include <utility>

#include "comm/Buffers.hpp"
#include "comm/Checks.hpp"
#include "comm/Communicator.hpp"
#include "comm/Types.hpp"
#include "nccl/Fallbacks.hpp"

namespace torchcomms_pg {

WorkPtr Communicator::allReduce(
    const at::Tensor& output,
    const at::Tensor& input,
    const c10d::ReduceOp& reduceOp,
    const Options& options) {
  auto call = newCall(OpKind::allReduce, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", input, device());
  const bool inPlace = output.is_same(input);
  if (!inPlace) {
    checkTensor(what, "output", output, device());
    checkSameType(what, "output", output, "tensor", input);
    checkNumel(what, "output", output, input.numel());
  }
  checkWritable(what, inPlace ? "tensor" : "output", output);
  Reduction reduction(what, reduceOp, input.scalar_type());
  describeTensors(call, {input}, {output}, reduction.name());

  Target target(output, /*readFirst=*/inPlace);
  const auto source = inPlace ? target.buffer() : input.contiguous();
  const size_t count = input.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    auto all = at::empty({size_, input.numel()}, input.options());
    call.launch = [this, source, all, count, type = reduction.wire().type](
                      ncclComm_t comm, cudaStream_t stream) {
      return api_.allGather(source.data_ptr(), all.data_ptr(), count, type, comm, stream);
    };
    call.after = [target, all, reduction] {
      reduction.combine(target.buffer().view({-1}), all);
      target.copyBack();
    };
    return issue(std::move(call));
  }
  call.launch = [this, target, source, count, reduction](ncclComm_t comm, cudaStream_t stream) {
    return reduction.with(api_, comm, [&](ncclRedOp_t op) {
      return api_.allReduce(
          source.data_ptr(), target.data(), count, reduction.wire().type, op, comm, stream);
    });
  };
  if (target.needsCopy()) {
    call.after = [target] { target.copyBack(); };
  }
  return issue(std::move(call));
}

WorkPtr Communicator::reduce(
    const at::Tensor& tensor, int root, const c10d::ReduceOp& reduceOp, const Options& options) {
  auto call = newCall(OpKind::reduce, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "tensor", tensor, device());
  checkWritable(what, "tensor", tensor);
  checkRank(what, "root", root, size_);
  Reduction reduction(what, reduceOp, tensor.scalar_type());
  describeTensors(call, {tensor}, {tensor}, reduction.name());
  call.op.peer = root;

  const bool isRoot = root == rank_;
  Target target(tensor, /*readFirst=*/true);
  const size_t count = tensor.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    auto all = at::empty({isRoot ? size_ : 0, tensor.numel()}, tensor.options());
    call.launch = [this, target, all, count, root, type = reduction.wire().type](
                      ncclComm_t comm, cudaStream_t stream) {
      return torchcomms_pg::gather(
          api_, target.data(), all.data_ptr(), count, type, root, comm, stream);
    };
    if (isRoot) {
      call.after = [target, all, reduction] {
        reduction.combine(target.buffer().view({-1}), all);
        target.copyBack();
      };
    }
    return issue(std::move(call));
  }
  call.launch = [this, target, count, root, reduction](ncclComm_t comm, cudaStream_t stream) {
    return reduction.with(api_, comm, [&](ncclRedOp_t op) {
      return api_.reduce(
          target.data(), target.data(), count, reduction.wire().type, op, root, comm, stream);
    });
  };
  if (isRoot && target.needsCopy()) {
    call.after = [target] { target.copyBack(); };
  }
  return issue(std::move(call));
}

WorkPtr Communicator::reduceScatterSingle(
    const at::Tensor& output,
    const at::Tensor& input,
    const c10d::ReduceOp& reduceOp,
    const Options& options) {
  auto call = newCall(OpKind::reduceScatterSingle, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "output", output, device());
  checkWritable(what, "output", output);
  checkTensor(what, "input", input, device());
  checkSameType(what, "output", output, "input", input);
  checkNumel(what, "input", input, output.numel() * size_);
  describeTensors(call, {input}, {output}, torchcomms_pg::name(reduceOp));
  launchReduceScatter(
      call, output, input.contiguous(), Reduction(what, reduceOp, input.scalar_type()));
  return issue(std::move(call));
}

WorkPtr Communicator::reduceScatter(
    const at::Tensor& output,
    const std::vector<at::Tensor>& inputs,
    const c10d::ReduceOp& reduceOp,
    const Options& options) {
  auto call = newCall(OpKind::reduceScatter, options);
  const char* const what = name(call.op.kind);
  checkTensor(what, "output", output, device());
  checkWritable(what, "output", output);
  checkListLength(what, "input_list", inputs.size(), size_);
  checkTensors(what, "input_list", inputs, output, device());
  checkNumel(
      what, ("input_list[" + std::to_string(rank_) + "]").c_str(), inputs[rank_], output.numel());
  Reduction reduction(what, reduceOp, output.scalar_type());
  describeTensors(call, inputs, {output}, reduction.name());

  if (sameNumel(inputs)) {
    launchReduceScatter(call, output, flatten(inputs), reduction);
    return issue(std::move(call));
  }
  // Parts of different sizes: one reduction for each rank, in one group.
  TORCH_CHECK_VALUE(
      reduction.onWire(),
      what,
      ": reduce op ",
      reduction.name(),
      " on ",
      output.scalar_type(),
      " needs tensors of one size in input_list; use all_reduce instead");
  const auto flat = flatten(inputs);
  std::vector<size_t> counts;
  for (const auto& input : inputs) {
    counts.push_back(input.numel() * reduction.wire().factor);
  }
  Target target(output, /*readFirst=*/false);
  const auto step = flat.element_size() / reduction.wire().factor;
  call.launch = [this, target, flat, counts, step, reduction](
                    ncclComm_t comm, cudaStream_t stream) {
    return reduction.with(api_, comm, [&](ncclRedOp_t op) {
      return grouped(api_, [&] {
        const auto* part = static_cast<const char*>(flat.data_ptr());
        for (int root = 0; root < size_; ++root) {
          const auto result = api_.reduce(
              part, target.data(), counts[root], reduction.wire().type, op, root, comm, stream);
          if (result != ncclSuccess) {
            return result;
          }
          part += counts[root] * step;
        }
        return ncclSuccess;
      });
    });
  };
  if (target.needsCopy()) {
    call.after = [target] { target.copyBack(); };
  }
  return issue(std::move(call));
}

void Communicator::launchReduceScatter(
    Call& call, const at::Tensor& output, const at::Tensor& input, const Reduction& reduction) {
  Target target(output, /*readFirst=*/false);
  const size_t count = output.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    auto parts = at::empty({size_, output.numel()}, output.options());
    call.launch = [this, input, parts, count, type = reduction.wire().type](
                      ncclComm_t comm, cudaStream_t stream) {
      return torchcomms_pg::allToAll(
          api_, input.data_ptr(), parts.data_ptr(), count, type, comm, stream);
    };
    call.after = [target, parts, reduction] {
      reduction.combine(target.buffer().view({-1}), parts);
      target.copyBack();
    };
    return;
  }
  call.launch = [this, target, input, count, reduction](ncclComm_t comm, cudaStream_t stream) {
    return reduction.with(api_, comm, [&](ncclRedOp_t op) {
      return api_.reduceScatter(
          input.data_ptr(), target.data(), count, reduction.wire().type, op, comm, stream);
    });
  };
  if (target.needsCopy()) {
    call.after = [target] { target.copyBack(); };
  }
}

}  // namespace torchcomms_pg
