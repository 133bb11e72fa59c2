// Operations on tensors of all ranks, and messages between two ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg::collectives {

// The operations of a communicator. Each function checks its arguments, describes the operation and
// has the communicator issue it. Tensors are on the communicator's device and may have any strides;
// shapes matter only if a function says so. All ranks must call the same collectives in the same
// order. For wrong arguments a function raises ValueError or TypeError and issues nothing.

using Options = Communicator::Options;
using Tensor = at::Tensor;
using Tensors = std::vector<at::Tensor>;

// Reductions.cpp
//
// Sets `output` to the ranks' inputs, reduced. `output` is `input` itself or does not overlap it.
WorkPtr allReduce(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input,
    const c10d::ReduceOp& op);
// Reduces in place as allReduce() does, on `root` only. Other ranks' `tensor` does not change.
WorkPtr reduce(
    Communicator& comm, const Options& options, const Tensor& tensor, int root,
    const c10d::ReduceOp& op);
// Reduces the ranks' inputs, of size * output.numel() elements each, and sets `output` to this
// rank's part of the result.
WorkPtr reduceScatterSingle(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input,
    const c10d::ReduceOp& op);
// Does what reduceScatterSingle() does, with a list of parts as input. The parts may differ in
// size if the library does the reduction.
WorkPtr reduceScatter(
    Communicator& comm, const Options& options, const Tensor& output, const Tensors& inputs,
    const c10d::ReduceOp& op);

// Gathering.cpp
WorkPtr broadcast(Communicator& comm, const Options& options, const Tensor& tensor, int root);
// Sets `output` to the concatenation of the ranks' inputs.
WorkPtr allGatherSingle(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input);
// Sets outputs[r] to the input of rank r. The ranks' inputs may differ in size.
WorkPtr allGather(
    Communicator& comm, const Options& options, const Tensors& outputs, const Tensor& input);
// Sets `outputs` as allGather() does, on `root` only. The ranks' inputs have equal sizes.
WorkPtr gather(
    Communicator& comm, const Options& options, const Tensors& outputs, const Tensor& input,
    int root);
// Sets `output` as allGatherSingle() does, on `root` only. Other ranks may pass nullopt.
WorkPtr gatherSingle(
    Communicator& comm, const Options& options, const std::optional<Tensor>& output,
    const Tensor& input, int root);
// Sets `output` on rank r to inputs[r] of `root`. Only the root passes `inputs`, of equal sizes.
WorkPtr scatter(
    Communicator& comm, const Options& options, const Tensor& output, const Tensors& inputs,
    int root);

// Exchanges.cpp
//
// Sends each rank its rows of `input`, and sets `output` to the rows received. Splits are numbers
// of rows (first dimension) for each rank; without splits all parts are equal.
WorkPtr allToAllSingle(
    Communicator& comm, const Options& options, const Tensor& output, const Tensor& input,
    const std::vector<int64_t>& outputSplits, const std::vector<int64_t>& inputSplits);
// Sets outputs[r] on rank s to inputs[s] of rank r.
WorkPtr allToAll(
    Communicator& comm, const Options& options, const Tensors& outputs, const Tensors& inputs);
WorkPtr barrier(Communicator& comm, const Options& options);
// Does what barrier() does, under another name in records.
WorkPtr monitoredBarrier(Communicator& comm, const Options& options);

// Messages.cpp
WorkPtr send(
    Communicator& comm, const Options& options, const Tensor& tensor, int destination, int tag);
// Receives into `tensor`. If `source` is kAnyPeer, takes the first message from any rank.
WorkPtr recv(Communicator& comm, const Options& options, const Tensor& tensor, int source, int tag);

}  // namespace torchcomms_pg::collectives
