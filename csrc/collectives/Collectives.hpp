// Operations on tensors of all ranks, and messages between two.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg::ops {

// Functions that check their arguments, prepare one operation and pass it to `comm` to issue.
// Tensors are on the communicator's device and may have any strides; shapes matter only where
// named. All ranks call the same collectives in the same order. Wrong arguments raise ValueError or
// TypeError, and nothing is issued.

// Reductions.cpp
//
// Sets output = op over ranks of input. They are the same tensor, or do not overlap.
WorkPtr allReduce(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& output,
    const at::Tensor& input,
    const c10d::ReduceOp& op);
// Reduces in place as allReduce, on `root` only; elsewhere `tensor` is unchanged.
WorkPtr reduce(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& tensor,
    int root,
    const c10d::ReduceOp& op);
// Sets output = op over ranks of part `rank` of input, which has size x output.numel elements.
WorkPtr reduceScatterSingle(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& output,
    const at::Tensor& input,
    const c10d::ReduceOp& op);
// Does the same with the parts as a list; they may differ in size.
WorkPtr reduceScatter(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& output,
    const std::vector<at::Tensor>& inputs,
    const c10d::ReduceOp& op);

// Gathering.cpp
WorkPtr broadcast(
    Communicator& comm, const Communicator::Options& options, const at::Tensor& tensor, int root);
// Sets output = the ranks' inputs one after another.
WorkPtr allGatherSingle(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& output,
    const at::Tensor& input);
// Sets outputs[r] = input of rank r; sizes may differ from rank to rank.
WorkPtr allGather(
    Communicator& comm,
    const Communicator::Options& options,
    const std::vector<at::Tensor>& outputs,
    const at::Tensor& input);
// Sets `outputs` as allGather does, on `root` only.
WorkPtr gather(
    Communicator& comm,
    const Communicator::Options& options,
    const std::vector<at::Tensor>& outputs,
    const at::Tensor& input,
    int root);
// Sets `output`, on `root` only, to the ranks' inputs one after another.
WorkPtr gatherSingle(
    Communicator& comm,
    const Communicator::Options& options,
    const std::optional<at::Tensor>& output,
    const at::Tensor& input,
    int root);
// Sets output = inputs[rank] of `root`, the only rank with inputs, which have equal sizes.
WorkPtr scatter(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& output,
    const std::vector<at::Tensor>& inputs,
    int root);

// Exchanges.cpp
//
// Sends each rank its rows of `input`. Splits count rows of the first dimension; empty: equal
// parts.
WorkPtr allToAllSingle(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& output,
    const at::Tensor& input,
    const std::vector<int64_t>& outputSplits,
    const std::vector<int64_t>& inputSplits);
// Sets outputs[r] = inputs[rank] of rank r.
WorkPtr allToAll(
    Communicator& comm,
    const Communicator::Options& options,
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs);
WorkPtr barrier(
    Communicator& comm, const Communicator::Options& options, OpKind kind = OpKind::barrier);

// Messages.cpp
WorkPtr send(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& tensor,
    int destination,
    int tag);
// Receives into `tensor`. `source` kAnyPeer: takes the first message that comes.
WorkPtr recv(
    Communicator& comm,
    const Communicator::Options& options,
    const at::Tensor& tensor,
    int source,
    int tag);

// Moves one message in the order of `stream`: matched by its tag, or over NCCL by its place in the
// order alone.
ncclResult_t moveMessage(
    const NcclApi& api, bool sending, const Message& message, ncclComm_t comm, cudaStream_t stream);

}  // namespace torchcomms_pg::ops
