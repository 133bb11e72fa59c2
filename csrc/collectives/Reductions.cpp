// Collectives that reduce.
#include <utility>

#include "collectives/Collectives.hpp"
#include "nccl/Fallbacks.hpp"
#include "nccl/Library.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"
#include "operation/Types.hpp"

namespace torchcomms_pg {

namespace {

constexpr int kFloat8Since = NCCL_VERSION(2, 24, 0);

// Chooses how to reduce, and raises if the library is too old for the dtype. The library itself
// would only report an invalid argument.
Reduction chooseReduction(
    const Communicator& comm,
    const char* what,
    const c10d::ReduceOp& reduceOp,
    c10::ScalarType dtype) {
  Reduction reduction(what, reduceOp, dtype);
  TORCH_CHECK(
      !c10::isFloat8Type(dtype) || comm.libraryVersion() >= kFloat8Since,
      what,
      ": reduce op ",
      reduction.name(),
      " of ",
      c10::toString(dtype),
      " tensors takes NCCL ",
      versionText(kFloat8Since),
      " or later, and the loaded library is ",
      versionText(comm.libraryVersion()),
      "; convert the tensor, for example to bfloat16, or load a newer one "
      "(TORCHCOMM_NCCL_LIBRARY)");
  return reduction;
}

// Sets the launch and the epilogue that reduce equal parts of the contiguous `input` into `output`.
void setReduceScatter(
    Communicator& comm,
    PreparedOp& call,
    const at::Tensor& output,
    const at::Tensor& input,
    const Reduction& reduction) {
  OutputBuffer target(output, /*readFirst=*/false);
  const size_t count = output.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    auto parts = at::empty({comm.size(), output.numel()}, output.options());
    call.launch = [&comm, input, parts, count, type = reduction.wire().type](
                      ncclComm_t handle, cudaStream_t stream) {
      return allToAll(comm.api(), input.data_ptr(), parts.data_ptr(), count, type, handle, stream);
    };
    call.epilogue = [target, parts, reduction] {
      reduction.combine(target.buffer().view({-1}), parts);
      target.copyBack();
    };
    return;
  }
  call.launch = [&comm, target, input, count, reduction](ncclComm_t handle, cudaStream_t stream) {
    const Reduction::Handle op(reduction, comm.api(), handle);
    if (op.made() != ncclSuccess) {
      return op.made();
    }
    return comm.api().reduceScatter(
        input.data_ptr(), target.data(), count, reduction.wire().type, op, handle, stream);
  };
  if (target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
}

}  // namespace

WorkPtr Collectives::allReduce(
    const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& reduceOp) {
  auto call = comm_.prepare(OpKind::allReduce, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, input, comm_.device());
  const bool inPlace = output.is_same(input);
  if (!inPlace) {
    checkTensor({what, "output"}, output, comm_.device());
    checkSameType({what, "output"}, output, "tensor", input);
    checkNumel({what, "output"}, output, input.numel());
  }
  checkWritable({what, inPlace ? "tensor" : "output"}, output);
  const auto reduction = chooseReduction(comm_, what, reduceOp, input.scalar_type());
  call.setTensors({input}, {output}, reduction.name());

  OutputBuffer target(output, /*readFirst=*/inPlace);
  const auto source = inPlace ? target.buffer() : input.contiguous();
  const size_t count = input.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    auto all = at::empty({comm_.size(), input.numel()}, input.options());
    call.launch = [&comm = comm_, source, all, count, type = reduction.wire().type](
                      ncclComm_t handle, cudaStream_t stream) {
      return comm.api().allGather(source.data_ptr(), all.data_ptr(), count, type, handle, stream);
    };
    call.epilogue = [target, all, reduction] {
      reduction.combine(target.buffer().view({-1}), all);
      target.copyBack();
    };
    return comm_.issue(std::move(call));
  }
  call.launch = [&comm = comm_, target, source, count, reduction](
                    ncclComm_t handle, cudaStream_t stream) {
    const Reduction::Handle op(reduction, comm.api(), handle);
    if (op.made() != ncclSuccess) {
      return op.made();
    }
    return comm.api().allReduce(
        source.data_ptr(), target.data(), count, reduction.wire().type, op, handle, stream);
  };
  if (target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::reduce(const at::Tensor& tensor, int root, const c10d::ReduceOp& reduceOp) {
  auto call = comm_.prepare(OpKind::reduce, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, tensor, comm_.device());
  checkWritable({what, "tensor"}, tensor);
  checkRank({what, "root"}, root, comm_.size());
  const auto reduction = chooseReduction(comm_, what, reduceOp, tensor.scalar_type());
  call.setTensors({tensor}, {tensor}, reduction.name());
  call.op.peer = root;

  const bool isRoot = root == comm_.rank();
  OutputBuffer target(tensor, /*readFirst=*/true);
  const size_t count = tensor.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    auto all = at::empty({isRoot ? comm_.size() : 0, tensor.numel()}, tensor.options());
    call.launch = [&comm = comm_, target, all, count, root, type = reduction.wire().type](
                      ncclComm_t handle, cudaStream_t stream) {
      return torchcomms_pg::gather(
          comm.api(), target.data(), all.data_ptr(), count, type, root, handle, stream);
    };
    if (isRoot) {
      call.epilogue = [target, all, reduction] {
        reduction.combine(target.buffer().view({-1}), all);
        target.copyBack();
      };
    }
    return comm_.issue(std::move(call));
  }
  call.launch = [&comm = comm_, target, count, root, reduction](
                    ncclComm_t handle, cudaStream_t stream) {
    const Reduction::Handle op(reduction, comm.api(), handle);
    if (op.made() != ncclSuccess) {
      return op.made();
    }
    return comm.api().reduce(
        target.data(), target.data(), count, reduction.wire().type, op, root, handle, stream);
  };
  if (isRoot && target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::reduceScatterSingle(
    const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& reduceOp) {
  auto call = comm_.prepare(OpKind::reduceScatterSingle, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "output"}, output, comm_.device());
  checkWritable({what, "output"}, output);
  checkTensor({what, "input"}, input, comm_.device());
  checkSameType({what, "output"}, output, "input", input);
  checkNumel({what, "input"}, input, output.numel() * comm_.size());
  call.setTensors({input}, {output}, name(reduceOp));
  setReduceScatter(
      comm_,
      call,
      output,
      input.contiguous(),
      chooseReduction(comm_, what, reduceOp, input.scalar_type()));
  return comm_.issue(std::move(call));
}

WorkPtr Collectives::reduceScatter(
    const at::Tensor& output,
    const std::vector<at::Tensor>& inputs,
    const c10d::ReduceOp& reduceOp) {
  auto call = comm_.prepare(OpKind::reduceScatter, options_);
  const char* const what = name(call.op.kind);
  checkTensor({what, "output"}, output, comm_.device());
  checkWritable({what, "output"}, output);
  checkListLength({what, "input_list"}, inputs.size(), comm_.size());
  checkTensors({what, "input_list"}, inputs, output, comm_.device());
  checkNumel(Argument{what, "input_list"}[comm_.rank()], inputs[comm_.rank()], output.numel());
  const auto reduction = chooseReduction(comm_, what, reduceOp, output.scalar_type());
  call.setTensors(inputs, {output}, reduction.name());

  // Otherwise one reduction for each rank, in one group.
  if (sameNumel(inputs) && !(comm_.listsOneByOne() && reduction.onWire())) {
    setReduceScatter(comm_, call, output, flatten(inputs), reduction);
    return comm_.issue(std::move(call));
  }
  TORCH_CHECK_VALUE(
      reduction.onWire(),
      what,
      ": reduce op ",
      reduction.name(),
      " on ",
      output.scalar_type(),
      " needs tensors of one size in input_list; use all_reduce instead");
  std::vector<at::Tensor> sources;
  for (const auto& input : inputs) {
    sources.push_back(input.contiguous());
  }
  OutputBuffer target(output, /*readFirst=*/false);
  call.launch = [&comm = comm_, target, sources, reduction](
                    ncclComm_t handle, cudaStream_t stream) {
    const Reduction::Handle op(reduction, comm.api(), handle);
    if (op.made() != ncclSuccess) {
      return op.made();
    }
    return groupedByRoot(comm.api(), comm.size(), [&](int root) {
      return comm.api().reduce(
          sources[root].data_ptr(),
          target.data(),
          sources[root].numel() * reduction.wire().factor,
          reduction.wire().type,
          op,
          root,
          handle,
          stream);
    });
  };
  if (target.needsCopy()) {
    call.epilogue = [target] { target.copyBack(); };
  }
  return comm_.issue(std::move(call));
}

}  // namespace torchcomms_pg
