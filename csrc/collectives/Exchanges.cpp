// Collectives in which every rank sends to every other: all-to-all, and the barrier, without data.
#include <utility>

#include "collectives/Collectives.hpp"
#include "collectives/Tasks.hpp"
#include "operation/Buffers.hpp"
#include "operation/Checks.hpp"

namespace torchcomms_pg::collectives {

namespace {

// Checks `splits` of `tensor` and returns the number of elements in each rank's part.
std::vector<int64_t> splitCounts(
    const char* what, const char* argument, const std::vector<int64_t>& splits,
    const Tensor& tensor, int size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        rows % size == 0, what, ": the first dimension of ", argument, " (", rows,
        ") is not divisible by the group size ", size, "; pass split sizes");
    return std::vector<int64_t>(size, tensor.numel() / size);
  }
  checkListLength({what, (std::string(argument) + "_split_sizes").c_str()}, splits.size(), size);
  int64_t sum = 0;
  for (const auto split : splits) {
    TORCH_CHECK_VALUE(
        split >= 0, what, ": ", argument, "_split_sizes holds ", split, ", wanted 0 or more");
    sum += split;
  }
  TORCH_CHECK_VALUE(
      sum == rows, what, ": ", argument, "_split_sizes add up to ", sum,
      ", wanted the first dimension of ", argument, ", ", rows);
  const int64_t perRow = rows == 0 ? 0 : tensor.numel() / rows;
  auto counts = splits;
  for (auto& count : counts) {
    count *= perRow;
  }
  return counts;
}

WorkPtr issueBarrier(Communicator& comm, const Options& options, OpKind kind) {
  auto call = comm.prepare(kind, options);
  if (comm.api().has(Feature::barrier)) {
    call.task = Collective{.kind = CollectiveKind::barrier};
    return comm.issue(std::move(call));
  }
  const auto token = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(comm.device()));
  auto max = moving(CollectiveKind::allReduce, token.data_ptr(), token.data_ptr(), 1, at::kByte);
  max.op.reduction = ncclMax;
  call.task = max;
  call.buffers = {token};
  return comm.issue(std::move(call));
}

}  // namespace

WorkPtr allToAllSingle(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input,
    const std::vector<int64_t>& outputSplits, const std::vector<int64_t>& inputSplits) {
  auto call = comm.prepare(OpKind::allToAllSingle, options);
  const char* const what = name(call.op.kind);
  checkPair(what, output, input, comm.device());
  const auto outputCounts = splitCounts(what, "output", outputSplits, output, comm.size());
  const auto inputCounts = splitCounts(what, "input", inputSplits, input, comm.size());
  call.setTensors({input}, {output});
  call.op.inputSplits = inputSplits;
  call.op.outputSplits = outputSplits;

  OutputBuffer target(output);
  const auto source = call.contiguous(input);
  if (outputSplits.empty() && inputSplits.empty()) {
    checkNumel({what, "output"}, output, input.numel());
    call.task = moving(
        CollectiveKind::allToAll, source.data_ptr(), target.data(), source.numel() / comm.size(),
        source.scalar_type());
  } else {
    const auto bytes = source.element_size();
    std::vector<Part> sends;
    std::vector<Part> receives;
    auto* from = static_cast<char*>(source.data_ptr());
    auto* to = static_cast<char*>(target.data());
    for (int peer = 0; peer < comm.size(); ++peer) {
      sends.push_back({from, inputCounts[peer], peer});
      receives.push_back({to, outputCounts[peer], peer});
      from += inputCounts[peer] * bytes;
      to += outputCounts[peer] * bytes;
    }
    setExchange(comm, call, sends, receives, source.scalar_type());
  }
  setCopyBack(call, target);
  return comm.issue(std::move(call));
}

WorkPtr allToAll(
    Communicator& comm, const Options& options, const Tensors& outputs, const Tensors& inputs) {
  auto call = comm.prepare(OpKind::allToAll, options);
  const char* const what = name(call.op.kind);
  checkListLength({what, "output_tensor_list"}, outputs.size(), comm.size());
  checkListLength({what, "input_tensor_list"}, inputs.size(), comm.size());
  checkTensors({what, "output_tensor_list"}, outputs, inputs.front(), comm.device());
  checkWritable({what, "output_tensor_list"}, outputs);
  checkTensors({what, "input_tensor_list"}, inputs, inputs.front(), comm.device());
  call.setTensors(inputs, outputs);

  std::vector<OutputBuffer> targets;
  std::vector<Part> sends;
  std::vector<Part> receives;
  for (int peer = 0; peer < comm.size(); ++peer) {
    const auto source = call.contiguous(inputs[peer]);
    targets.emplace_back(outputs[peer]);
    sends.push_back({source.data_ptr(), source.numel(), peer});
    receives.push_back({targets.back().data(), outputs[peer].numel(), peer});
  }
  setExchange(comm, call, sends, receives, call.op.dtype);
  setCopyBack(call, targets);
  return comm.issue(std::move(call));
}

WorkPtr barrier(Communicator& comm, const Options& options) {
  return issueBarrier(comm, options, OpKind::barrier);
}

WorkPtr monitoredBarrier(Communicator& comm, const Options& options) {
  return issueBarrier(comm, options, OpKind::monitoredBarrier);
}

}  // namespace torchcomms_pg::collectives
