#include "comm/Operation.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>

namespace torchcomms_pg {

namespace {

struct Names {
  const char* name;
  const char* title;
  const char* titleOfGloo;
  const char* record;
  c10d::OpType type;
};

const Names& names(OpKind kind) {
  using c10d::OpType;
#define TORCHCOMMS_PG_NAMES(name, gloo, record, type)            \
  {                                                              \
    name, "torchcomms:" name, "gloo:" gloo, record, OpType::type \
  }
  static constexpr Names kNames[] = {
      TORCHCOMMS_PG_NAMES("all_reduce", "all_reduce", "allreduce", ALLREDUCE),
      TORCHCOMMS_PG_NAMES("broadcast", "broadcast", "broadcast", BROADCAST),
      TORCHCOMMS_PG_NAMES("reduce", "reduce", "reduce", REDUCE),
      TORCHCOMMS_PG_NAMES("all_gather", "all_gather", "all_gather", ALLGATHER),
      TORCHCOMMS_PG_NAMES("all_gather_single", "all_gather", "_allgather_base", _ALLGATHER_BASE),
      TORCHCOMMS_PG_NAMES("reduce_scatter", "reduce_scatter", "reduce_scatter", REDUCE_SCATTER),
      TORCHCOMMS_PG_NAMES(
          "reduce_scatter_single",
          "reduce_scatter_single",
          "_reduce_scatter_base",
          _REDUCE_SCATTER_BASE),
      TORCHCOMMS_PG_NAMES("all_to_all", "all_to_all", "all_to_all", ALLTOALL),
      TORCHCOMMS_PG_NAMES("all_to_all_single", "all_to_all", "all_to_all", ALLTOALL_BASE),
      TORCHCOMMS_PG_NAMES("gather", "gather", "gather", GATHER),
      TORCHCOMMS_PG_NAMES("gather_single", "gather", "gather", GATHER),
      TORCHCOMMS_PG_NAMES("scatter", "scatter", "scatter", SCATTER),
      TORCHCOMMS_PG_NAMES("send", "send", "send", SEND),
      TORCHCOMMS_PG_NAMES("recv", "recv", "recv", RECV),
      TORCHCOMMS_PG_NAMES("barrier", "barrier", "barrier", BARRIER),
      TORCHCOMMS_PG_NAMES("monitored_barrier", "barrier", "barrier", BARRIER),
      TORCHCOMMS_PG_NAMES("coalesced", "coalesced", "coalesced", COALESCED),
      TORCHCOMMS_PG_NAMES("new_window", "new_window", "new_window", UNKNOWN),
      TORCHCOMMS_PG_NAMES("tensor_register", "tensor_register", "tensor_register", UNKNOWN),
      TORCHCOMMS_PG_NAMES("tensor_deregister", "tensor_deregister", "tensor_deregister", UNKNOWN),
      TORCHCOMMS_PG_NAMES("put", "put", "put", UNKNOWN),
      TORCHCOMMS_PG_NAMES("signal", "signal", "signal", UNKNOWN),
      TORCHCOMMS_PG_NAMES("wait_signal", "wait_signal", "wait_signal", UNKNOWN),
      TORCHCOMMS_PG_NAMES("split", "split", "split", UNKNOWN),
      TORCHCOMMS_PG_NAMES("shrink", "shrink", "shrink", UNKNOWN),
      TORCHCOMMS_PG_NAMES("register_mem_pool", "register_mem_pool", "register_mem_pool", UNKNOWN),
      TORCHCOMMS_PG_NAMES("suspend", "suspend", "suspend", UNKNOWN),
      TORCHCOMMS_PG_NAMES("resume", "resume", "resume", UNKNOWN),
      TORCHCOMMS_PG_NAMES("init", "init", "init", UNKNOWN),
  };
#undef TORCHCOMMS_PG_NAMES
  static_assert(std::size(kNames) == static_cast<size_t>(OpKind::initialization) + 1);
  return kNames[static_cast<size_t>(kind)];
}

// Whether the operation has tensors of its own to tell of.
bool hasData(OpKind kind) {
  return kind < OpKind::barrier || kind == OpKind::coalesced || kind == OpKind::tensorRegister ||
         kind == OpKind::put;
}

}  // namespace

const char* name(OpKind kind) {
  return names(kind).name;
}

const char* recordName(OpKind kind) {
  return names(kind).record;
}

const char* profilingTitle(const Operation& op, const Group& group) {
  if (group.backend != "gloo") {
    return names(op.kind).title;
  }
  if (op.kind == OpKind::recv && op.peer < 0) {
    return "gloo:recvAnySource";
  }
  return names(op.kind == OpKind::coalesced ? op.parts : op.kind).titleOfGloo;
}

c10d::OpType opType(OpKind kind) {
  return names(kind).type;
}

std::string describe(const Operation& op) {
  std::ostringstream out;
  if (isManagement(op.kind)) {
    return name(op.kind);
  }
  out << name(op.kind) << " #" << op.seq;
  switch (op.kind) {
    case OpKind::send:
    case OpKind::put:
    case OpKind::signal: out << " to rank " << op.peer; break;
    case OpKind::waitSignal:
    case OpKind::recv:
      if (op.peer >= 0) {
        out << " from rank " << op.peer;
      } else {
        out << " from any rank";
      }
      break;
    default: break;
  }
  if (!hasData(op.kind)) {
    return out.str();
  }
  const bool message = isPointToPoint(op.kind);  // which has one tensor
  out << " (" << (message ? std::max(op.numelIn, op.numelOut) : op.numelIn);
  if (!message && op.numelOut != op.numelIn) {
    out << " -> " << op.numelOut;
  }
  out << " x " << c10::toString(op.dtype);
  if (op.reduceOp != nullptr) {
    out << ", " << op.reduceOp;
  }
  if (!isPointToPoint(op.kind) && op.peer >= 0) {
    out << ", root " << op.peer;
  }
  if (op.tag != 0) {
    out << ", tag " << op.tag;
  }
  out << ")";
  return out.str();
}

std::string inSeconds(Milliseconds duration) {
  std::ostringstream out;
  out << static_cast<double>(duration.count()) / 1000.0 << " s";
  return out.str();
}

std::string joinRanks(const std::vector<int>& ranks) {
  std::ostringstream out;
  for (size_t i = 0; i < ranks.size(); ++i) {
    out << (i == 0 ? "" : ", ") << ranks[i];
  }
  return out.str();
}

}  // namespace torchcomms_pg
