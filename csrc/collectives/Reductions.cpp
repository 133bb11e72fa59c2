// Collectives that reduce.
#include <optional>
#include <utility>

#include "collectives/Collectives.hpp"
#include "collectives/Tasks.hpp"
#include "nccl/Library.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"
#include "operation/Types.hpp"

namespace torchcomms_pg::collectives {

namespace {

constexpr int kFloat8Since = NCCL_VERSION(2, 24, 0);

// Chooses how to reduce. Raises if the library is too old for the dtype: the library's own error
// would only say that an argument is invalid.
Reduction chooseReduction(
    const Communicator& comm, const char* what, const c10d::ReduceOp& reduceOp,
    c10::ScalarType dtype) {
  Reduction reduction(what, reduceOp, dtype);
  TORCH_CHECK(
      !c10::isFloat8Type(dtype) || comm.api().version() >= kFloat8Since, what, ": reduce op ",
      reduction.name(), " of ", c10::toString(dtype), " tensors takes NCCL ",
      versionText(kFloat8Since), " or later, and the loaded library is ",
      versionText(comm.api().version()),
      "; convert the tensor, for example to bfloat16, or load a newer one "
      "(TORCHCOMM_NCCL_LIBRARY)");
  return reduction;
}

// Describes a collective. Its operator is ncclSum if the library only moves the data.
Collective describe(
    CollectiveKind kind, const Tensor& input, const Tensor& output, size_t count,
    const Reduction& reduction, int root) {
  return {
      .kind = kind,
      .input = input.data_ptr(),
      .output = output.data_ptr(),
      .count = count,
      .type = reduction.wire().type,
      .root = root,
      .op = reduction.onWire() ? reduction.wireOp() : Operator{}};
}

// Keeps the factor of a pre-multiplied sum: an accelerator reads it when the operation runs.
void keepFactor(PreparedOp& call, const Reduction& reduction) {
  if (reduction.factor().defined()) {
    call.buffers.push_back(reduction.factor());
  }
}

// Makes the library reduce the ranks' `input`s into `output`.
void setReduction(
    PreparedOp& call, CollectiveKind kind, const Tensor& input, const Tensor& output, size_t count,
    const Reduction& reduction, int root = 0) {
  call.task = describe(kind, input, output, count, reduction, root);
  keepFactor(call, reduction);
}

// Makes the library move the ranks' inputs into `parts`, and the epilogue reduce `parts` into
// `target`. `target` has no value on a rank that gets no result.
void setLocalReduction(
    PreparedOp& call, CollectiveKind kind, const Tensor& input, const Tensor& parts, size_t count,
    const Reduction& reduction, const std::optional<OutputBuffer>& target, int root = 0) {
  call.task = describe(kind, input, parts, count, reduction, root);
  call.buffers.push_back(parts);
  if (target) {
    call.epilogue = [target = *target, parts, reduction] {
      reduction.combine(target.buffer().view({-1}), parts);
      target.copyBack();
    };
  }
}

// Makes the operation reduce the ranks' `input`s, contiguous and of equal parts, and set `output`
// to this rank's part of the result.
void setReduceScatter(
    const Communicator& comm, PreparedOp& call, const Tensor& output, const Tensor& input,
    const Reduction& reduction) {
  OutputBuffer target(output);
  const size_t count = output.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    const auto parts = at::empty({comm.size(), output.numel()}, output.options());
    setLocalReduction(call, CollectiveKind::allToAll, input, parts, count, reduction, target);
    return;
  }
  setReduction(call, CollectiveKind::reduceScatter, input, target.buffer(), count, reduction);
  setCopyBack(call, target);
}

}  // namespace

WorkPtr allReduce(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input,
    const c10d::ReduceOp& reduceOp) {
  auto call = comm.prepare(OpKind::allReduce, options);
  const char* const what = name(call.op.kind);
  checkTensor({what, "tensor"}, input, comm.device());
  const bool inPlace = output.is_same(input);
  if (!inPlace) {
    checkTensor({what, "output"}, output, comm.device());
    checkSameType({what, "output"}, output, "tensor", input);
    checkNumel({what, "output"}, output, input.numel());
  }
  checkWritable({what, inPlace ? "tensor" : "output"}, output);
  const auto reduction = chooseReduction(comm, what, reduceOp, input.scalar_type());
  call.setTensors({input}, {output}, reduction.name());

  OutputBuffer target(output);
  if (inPlace) {
    call.fill(target);
  }
  const auto source = inPlace ? target.buffer() : call.contiguous(input);
  const size_t count = input.numel() * reduction.wire().factor;
  if (!reduction.onWire()) {
    const auto all = at::empty({comm.size(), input.numel()}, input.options());
    setLocalReduction(call, CollectiveKind::allGather, source, all, count, reduction, target);
    return comm.issue(std::move(call));
  }
  setReduction(call, CollectiveKind::allReduce, source, target.buffer(), count, reduction);
  setCopyBack(call, target);
  return comm.issue(std::move(call));
}

WorkPtr reduce(
    Communicator& comm, const Options& options, const Tensor& tensor, int root,
    const c10d::ReduceOp& reduceOp) {
  auto call = comm.prepare(OpKind::reduce, options);
  const char* const what = name(call.op.kind);
  checkOutput({what, "tensor"}, tensor, comm.device());
  checkRank({what, "root"}, root, comm.size());
  const auto reduction = chooseReduction(comm, what, reduceOp, tensor.scalar_type());
  call.setTensors({tensor}, {tensor}, reduction.name());
  call.op.peer = root;

  const bool isRoot = root == comm.rank();
  OutputBuffer target(tensor);
  call.fill(target);
  const size_t count = tensor.numel() * reduction.wire().factor;
  const auto& buffer = target.buffer();
  if (!reduction.onWire()) {
    const auto all = at::empty({isRoot ? comm.size() : 0, tensor.numel()}, tensor.options());
    const auto result = isRoot ? std::optional(target) : std::nullopt;
    setLocalReduction(call, CollectiveKind::gather, buffer, all, count, reduction, result, root);
    return comm.issue(std::move(call));
  }
  setReduction(call, CollectiveKind::reduce, buffer, buffer, count, reduction, root);
  if (isRoot) {
    setCopyBack(call, target);
  }
  return comm.issue(std::move(call));
}

WorkPtr reduceScatterSingle(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input,
    const c10d::ReduceOp& reduceOp) {
  auto call = comm.prepare(OpKind::reduceScatterSingle, options);
  const char* const what = name(call.op.kind);
  checkPair(what, output, input, comm.device());
  checkNumel({what, "input"}, input, output.numel() * comm.size());
  call.setTensors({input}, {output}, name(reduceOp));
  const auto reduction = chooseReduction(comm, what, reduceOp, input.scalar_type());
  setReduceScatter(comm, call, output, call.contiguous(input), reduction);
  return comm.issue(std::move(call));
}

WorkPtr reduceScatter(
    Communicator& comm, const Options& options, const Tensor& output, const Tensors& inputs,
    const c10d::ReduceOp& reduceOp) {
  auto call = comm.prepare(OpKind::reduceScatter, options);
  const char* const what = name(call.op.kind);
  checkOutput({what, "output"}, output, comm.device());
  checkListLength({what, "input_list"}, inputs.size(), comm.size());
  checkTensors({what, "input_list"}, inputs, output, comm.device());
  checkNumel(Argument{what, "input_list"}[comm.rank()], inputs[comm.rank()], output.numel());
  const auto reduction = chooseReduction(comm, what, reduceOp, output.scalar_type());
  call.setTensors(inputs, {output}, reduction.name());

  // Except in this case, the operation is one reduce to each rank, in one group.
  if (sameNumel(inputs) && !(comm.listsOneByOne() && reduction.onWire())) {
    setReduceScatter(comm, call, output, call.flat(inputs), reduction);
    return comm.issue(std::move(call));
  }
  TORCH_CHECK_VALUE(
      reduction.onWire(), what, ": reduce op ", reduction.name(), " on ", output.scalar_type(),
      " needs tensors of one size in input_list; use all_reduce instead");
  OutputBuffer target(output);
  std::vector<Collective> parts;
  for (int root = 0; root < comm.size(); ++root) {
    const auto source = call.contiguous(inputs[root]);
    const size_t count = source.numel() * reduction.wire().factor;
    parts.push_back(
        describe(CollectiveKind::reduce, source, target.buffer(), count, reduction, root));
  }
  setGrouped(comm, call, std::move(parts));
  keepFactor(call, reduction);
  setCopyBack(call, target);
  return comm.issue(std::move(call));
}

}  // namespace torchcomms_pg::collectives
