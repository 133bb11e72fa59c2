// Reports of operations to torch's profiler and execution trace, as ProcessGroupNCCL makes them
// ("record_param_comms" events).
#pragma once

#include <ATen/record_function.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg {

// Calls `body` inside a record of `op`, and returns its result. Without listeners only calls
// `body`, since a record costs about a microsecond. A record without tensors, such as a wait's, has
// no elements: tools that sum up a group's traffic must not count the operation twice.
template <class Body>
decltype(auto) withParamComms(
    const Communicator& comm, const Operation& op, const char* what,
    const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, bool hasWork,
    Body&& body) {
  if (C10_LIKELY(!at::hasCallbacks())) {
    return body();
  }
  const auto& group = comm.group();
  const bool moves = !inputs.empty() || !outputs.empty();
  const auto [numelIn, numelOut] = profileSizes(op, comm.size());
  TORCHCOMMS_PG_RECORD_PARAM_COMMS(
      op.async, std::make_tuple(static_cast<int64_t>(op.seq), op.countsAsMessage()),
      std::make_tuple(group.name, group.description), inputs, outputs,
      isPointToPoint(op.kind) || op.peer >= 0 ? op.peer : comm.rank(), std::string(what),
      moves ? numelIn : 0, moves ? numelOut : 0, moves ? op.dtype : c10::ScalarType::Byte,
      op.inputSplits, op.outputSplits, group.globalRankStart, group.globalRankStride, comm.size());
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  std::vector<c10::IValue> values;
  if (!hasWork && range.isActive()) {  // a Work has its own range, of the same form
    values.assign(inputs.begin(), inputs.end());
    range._setAsync();
    const auto title = rangeName(op, group, comm.rank(), !comm.device().is_cpu());
    range.before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
  return body();
}

// Records the messages of a batch, numbered from `seq`. The batch itself has no record, as in
// ProcessGroupNCCL.
inline void recordMessages(
    const Communicator& comm, const std::vector<PreparedOp>& messages, uint64_t seq) {
  if (C10_LIKELY(!at::hasCallbacks())) {
    return;  // spares the copies
  }
  for (const auto& message : messages) {
    auto op = message.op;
    op.seq = seq++;
    withParamComms(
        comm, op, profileName(op), message.inputs, message.outputs, /*hasWork=*/true, [] {});
  }
}

}  // namespace torchcomms_pg
