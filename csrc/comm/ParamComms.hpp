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

// Calls `body` inside the record; without listeners only calls it, since the record costs about a
// microsecond.
template <class Body>
decltype(auto) withParamComms(
    const Communicator& comm,
    const Operation& op,
    const char* what,
    const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& outputs,
    bool hasWork,
    Body&& body) {
  if (C10_LIKELY(!at::hasCallbacks())) {
    return body();
  }
  const auto& group = comm.group();
  TORCHCOMMS_PG_RECORD_PARAM_COMMS(
      op.async,
      std::make_tuple(static_cast<int64_t>(op.seq), isPointToPoint(op.kind)),
      std::make_tuple(group.name, group.description),
      inputs,
      outputs,
      isPointToPoint(op.kind) || op.peer >= 0 ? op.peer : comm.rank(),
      std::string(what),
      op.numelIn,
      op.numelOut,
      op.dtype,
      op.inputSplits,
      op.outputSplits,
      group.globalRankStart,
      group.globalRankStride,
      comm.size());
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  std::vector<c10::IValue> values;
  if (!hasWork && range.isActive()) {  // a Work has its own range, in the same form
    values.assign(inputs.begin(), inputs.end());
    range._setAsync();
    range.before(
        profilingTitle(op, group), c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
  return body();
}

}  // namespace torchcomms_pg
