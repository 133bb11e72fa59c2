// Operations on tensors of all ranks, and messages between two ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg {

// The operations of a communicator. Make an object for each call: Collectives(comm,
// options).reduce(). Each method checks its arguments, describes the operation and has the
// communicator issue it. Tensors are on the communicator's device and may have any strides; shapes
// matter only if a method says so. All ranks must call the same collectives in the same order. For
// wrong arguments a method raises ValueError or TypeError and issues nothing.
class Collectives final {
 public:
  Collectives(Communicator& comm, const Communicator::Options& options)
      : comm_(comm), options_(options) {}

  // Reductions.cpp
  //
  // Sets `output` to the ranks' inputs, reduced. `output` is `input` itself or does not overlap it.
  WorkPtr allReduce(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  // Reduces in place as allReduce() does, on `root` only. Other ranks' `tensor` does not change.
  WorkPtr reduce(const at::Tensor& tensor, int root, const c10d::ReduceOp& op);
  // Reduces the ranks' inputs, of size * output.numel() elements each, and sets `output` to this
  // rank's part of the result.
  WorkPtr reduceScatterSingle(
      const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  // Does what reduceScatterSingle() does, with a list of parts as input. The parts may differ in
  // size if the library does the reduction.
  WorkPtr reduceScatter(
      const at::Tensor& output, const std::vector<at::Tensor>& inputs, const c10d::ReduceOp& op);

  // Gathering.cpp
  WorkPtr broadcast(const at::Tensor& tensor, int root);
  // Sets `output` to the concatenation of the ranks' inputs.
  WorkPtr allGatherSingle(const at::Tensor& output, const at::Tensor& input);
  // Sets outputs[r] to the input of rank r. The ranks' inputs may differ in size.
  WorkPtr allGather(const std::vector<at::Tensor>& outputs, const at::Tensor& input);
  // Sets `outputs` as allGather() does, on `root` only. The ranks' inputs have equal sizes.
  WorkPtr gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int root);
  // Sets `output` as allGatherSingle() does, on `root` only. Other ranks may pass nullopt.
  WorkPtr gatherSingle(const std::optional<at::Tensor>& output, const at::Tensor& input, int root);
  // Sets `output` on rank r to inputs[r] of `root`. Only the root passes `inputs`, of equal sizes.
  WorkPtr scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root);

  // Exchanges.cpp
  //
  // Sends each rank its rows of `input`, and sets `output` to the rows received. Splits are numbers
  // of rows (first dimension) for each rank; without splits all parts are equal.
  WorkPtr allToAllSingle(
      const at::Tensor& output,
      const at::Tensor& input,
      const std::vector<int64_t>& outputSplits,
      const std::vector<int64_t>& inputSplits);
  // Sets outputs[r] on rank s to inputs[s] of rank r.
  WorkPtr allToAll(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  WorkPtr barrier() { return issueBarrier(OpKind::barrier); }
  // Does what barrier() does, under another name in records.
  WorkPtr monitoredBarrier() { return issueBarrier(OpKind::monitoredBarrier); }

  // Messages.cpp
  WorkPtr send(const at::Tensor& tensor, int destination, int tag);
  // Receives into `tensor`. If `source` is kAnyPeer, takes the first message from any rank.
  WorkPtr recv(const at::Tensor& tensor, int source, int tag);

 private:
  WorkPtr issueBarrier(OpKind kind);

  Communicator& comm_;
  const Communicator::Options options_;
};

}  // namespace torchcomms_pg
