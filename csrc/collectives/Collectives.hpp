// Operations on tensors of all ranks, and messages between two ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg {

// The operations of a communicator. Make one for each call: Collectives(comm, options).reduce().
// Each operation checks its arguments, prepares the operation and passes it to the communicator to
// issue. Tensors are on the communicator's device and may have any strides; shapes matter only if a
// method says so. All ranks call the same collectives in the same order. Wrong arguments raise
// ValueError or TypeError, and nothing is issued.
class Collectives final {
 public:
  Collectives(Communicator& comm, const Communicator::Options& options)
      : comm_(comm), options_(options) {}

  // Reductions.cpp
  //
  // Sets output = op over ranks of input. Both are the same tensor, or do not overlap.
  WorkPtr allReduce(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  // Reduces in place as allReduce, on `root` only; on other ranks `tensor` is unchanged.
  WorkPtr reduce(const at::Tensor& tensor, int root, const c10d::ReduceOp& op);
  // Reduces the ranks' inputs, which have size * output.numel() elements, and sets output to part
  // `rank` of the result.
  WorkPtr reduceScatterSingle(
      const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  // Does the same with the parts as a list, whose tensors may differ in size.
  WorkPtr reduceScatter(
      const at::Tensor& output, const std::vector<at::Tensor>& inputs, const c10d::ReduceOp& op);

  // Gathering.cpp
  WorkPtr broadcast(const at::Tensor& tensor, int root);
  // Sets output = the ranks' inputs, concatenated.
  WorkPtr allGatherSingle(const at::Tensor& output, const at::Tensor& input);
  // Sets outputs[r] = input of rank r; sizes may differ from rank to rank.
  WorkPtr allGather(const std::vector<at::Tensor>& outputs, const at::Tensor& input);
  // Sets `outputs` as allGather does, on `root` only.
  WorkPtr gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int root);
  // Sets `output`, on `root` only, to the ranks' inputs, concatenated.
  WorkPtr gatherSingle(const std::optional<at::Tensor>& output, const at::Tensor& input, int root);
  // Sets output = inputs[rank] of `root`. The root alone passes `inputs`, which have equal sizes.
  WorkPtr scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root);

  // Exchanges.cpp
  //
  // Sends each rank its rows of `input`. Splits count rows of the first dimension; without splits
  // the parts are equal.
  WorkPtr allToAllSingle(
      const at::Tensor& output,
      const at::Tensor& input,
      const std::vector<int64_t>& outputSplits,
      const std::vector<int64_t>& inputSplits);
  // Sets outputs[r] = inputs[rank] of rank r.
  WorkPtr allToAll(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  WorkPtr barrier() { return issueBarrier(OpKind::barrier); }
  // Does the same under another name.
  WorkPtr monitoredBarrier() { return issueBarrier(OpKind::monitoredBarrier); }

  // Messages.cpp
  WorkPtr send(const at::Tensor& tensor, int destination, int tag);
  // Receives into `tensor`. kAnyPeer as `source` takes the first message that any rank sends.
  WorkPtr recv(const at::Tensor& tensor, int source, int tag);

 private:
  WorkPtr issueBarrier(OpKind kind);

  Communicator& comm_;
  const Communicator::Options options_;
};

}  // namespace torchcomms_pg
