#include "operation/Operation.hpp"

#include <algorithm>
#include <iterator>

#include "base/TextStreams.hpp"
#include "base/TorchCompat.hpp"

namespace torchcomms_pg {

namespace {

using c10d::OpType;

#define TORCHCOMMS_PG_NAMES(kind, name, gloo, profile, type) \
  OpKind::kind, name, "torchcomms:" name, "gloo:" gloo, profile, OpType::type

// The kinds in the order of OpKind.
constexpr OpTraits kTraits[] = {
    {TORCHCOMMS_PG_NAMES(allReduce, "all_reduce", "all_reduce", "allreduce", ALLREDUCE),
     OpName::all_reduce, "all_reduce", "allreduce_coalesced"},
    {TORCHCOMMS_PG_NAMES(broadcast, "broadcast", "broadcast", "broadcast", BROADCAST),
     OpName::broadcast, "broadcast"},
    {TORCHCOMMS_PG_NAMES(reduce, "reduce", "reduce", "reduce", REDUCE), OpName::reduce, "reduce"},
    {TORCHCOMMS_PG_NAMES(allGather, "all_gather", "all_gather", "all_gather", ALLGATHER),
     OpName::all_gather, "all_gather", "ALLGATHER_coalesced", OpName::all_gather_v},
    {TORCHCOMMS_PG_NAMES(
         allGatherSingle, "all_gather_single", "all_gather", "_allgather_base", _ALLGATHER_BASE),
     OpName::all_gather_single, "_all_gather_base", "all_gather_into_tensor_coalesced"},
    {TORCHCOMMS_PG_NAMES(
         reduceScatter, "reduce_scatter", "reduce_scatter", "reduce_scatter", REDUCE_SCATTER),
     OpName::reduce_scatter, "reduce_scatter", "REDUCE_SCATTER_coalesced",
     OpName::reduce_scatter_v},
    {TORCHCOMMS_PG_NAMES(
         reduceScatterSingle, "reduce_scatter_single", "reduce_scatter_single",
         "_reduce_scatter_base", _REDUCE_SCATTER_BASE),
     OpName::reduce_scatter_single, "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"},
    {TORCHCOMMS_PG_NAMES(allToAll, "all_to_all", "all_to_all", "all_to_all", ALLTOALL),
     OpName::all_to_all, "all_to_all"},
    {TORCHCOMMS_PG_NAMES(
         allToAllSingle, "all_to_all_single", "all_to_all", "all_to_allv", ALLTOALL_BASE),
     OpName::all_to_all_single, "all_to_all", kUnchecked, OpName::all_to_all_v_single},
    {TORCHCOMMS_PG_NAMES(gather, "gather", "gather", "gather", GATHER), OpName::gather, "gather"},
    {TORCHCOMMS_PG_NAMES(gatherSingle, "gather_single", "gather", "gather", GATHER),
     OpName::gather_single, "gather"},
    {TORCHCOMMS_PG_NAMES(scatter, "scatter", "scatter", "scatter", SCATTER), OpName::scatter,
     "scatter"},
    {TORCHCOMMS_PG_NAMES(send, "send", "send", "send", SEND), OpName::send, "send"},
    {TORCHCOMMS_PG_NAMES(recv, "recv", "recv", "recv", RECV), OpName::recv, "recv"},
    {TORCHCOMMS_PG_NAMES(barrier, "barrier", "barrier", "barrier", BARRIER), OpName::barrier,
     "all_reduce_barrier"},
    {TORCHCOMMS_PG_NAMES(monitoredBarrier, "monitored_barrier", "barrier", "barrier", BARRIER),
     OpName::barrier, "all_reduce_barrier"},
    {TORCHCOMMS_PG_NAMES(coalesced, "coalesced", "coalesced", "coalesced", COALESCED),
     OpName::batch_op_issue, kUnchecked},
    {TORCHCOMMS_PG_NAMES(newWindow, "new_window", "new_window", "new_window", UNKNOWN),
     OpName::new_window, kAnalyserKnowsSplits ? "new_window" : kUnchecked},
    {TORCHCOMMS_PG_NAMES(
         tensorRegister, "tensor_register", "tensor_register", "tensor_register", UNKNOWN),
     OpName::tensor_register, kUnchecked},
    {TORCHCOMMS_PG_NAMES(
         tensorDeregister, "tensor_deregister", "tensor_deregister", "tensor_deregister", UNKNOWN),
     OpName::tensor_deregister, kUnchecked},
    {TORCHCOMMS_PG_NAMES(put, "put", "put", "put", UNKNOWN), OpName::put, "put"},
    {TORCHCOMMS_PG_NAMES(signal, "signal", "signal", "signal", UNKNOWN), OpName::signal, "signal"},
    {TORCHCOMMS_PG_NAMES(waitSignal, "wait_signal", "wait_signal", "wait_signal", UNKNOWN),
     OpName::wait_signal, "wait_signal"},
    {TORCHCOMMS_PG_NAMES(split, "split", "split", "split", UNKNOWN), OpName::split,
     kAnalyserKnowsSplits ? "split" : kUnchecked},
    {TORCHCOMMS_PG_NAMES(shrink, "shrink", "shrink", "shrink", UNKNOWN), OpName::shrink, nullptr},
    {TORCHCOMMS_PG_NAMES(
         registerMemory, "register_mem_pool", "register_mem_pool", "register_mem_pool", UNKNOWN),
     std::nullopt, nullptr},
    {TORCHCOMMS_PG_NAMES(suspend, "suspend", "suspend", "suspend", UNKNOWN), std::nullopt, nullptr},
    {TORCHCOMMS_PG_NAMES(resume, "resume", "resume", "resume", UNKNOWN), std::nullopt, nullptr},
    {TORCHCOMMS_PG_NAMES(initialization, "init", "init", "init", UNKNOWN), std::nullopt, nullptr},
};

#undef TORCHCOMMS_PG_NAMES

static_assert(std::size(kTraits) == static_cast<size_t>(OpKind::initialization) + 1);
static_assert([] {
  for (size_t i = 0; i < std::size(kTraits); ++i) {
    if (static_cast<size_t>(kTraits[i].kind) != i) {
      return false;
    }
  }
  return true;
}());

// Returns whether the operation has elements to describe.
bool hasData(OpKind kind) {
  return kind < OpKind::barrier || kind == OpKind::coalesced || kind == OpKind::tensorRegister ||
         kind == OpKind::put;
}

// Returns whether all ranks must pass the same number of elements. False if parts may differ in
// size, or if only the root passes all ranks' elements.
bool sameSizes(OpKind kind) {
  switch (kind) {
    case OpKind::allReduce:
    case OpKind::broadcast:
    case OpKind::reduce:
    case OpKind::allGatherSingle:
    case OpKind::reduceScatterSingle: return true;
    default: return false;
  }
}

}  // namespace

const OpTraits& traits(OpKind kind) {
  return kTraits[static_cast<size_t>(kind)];
}

bool needsAlive(const Operation& op, int rank, int other) {
  switch (op.kind == OpKind::coalesced ? op.parts : op.kind) {
    case OpKind::allReduce:
    case OpKind::allGatherSingle:
    case OpKind::reduceScatter:
    case OpKind::reduceScatterSingle:
    case OpKind::barrier: return true;
    case OpKind::allGather: return op.numelIn > 0;
    case OpKind::allToAllSingle: return op.inputSplits.empty() && op.outputSplits.empty();
    case OpKind::broadcast:
    case OpKind::scatter: return op.kind != OpKind::coalesced && op.peer == rank;
    case OpKind::reduce:
    case OpKind::gather:
    case OpKind::gatherSingle: return op.kind != OpKind::coalesced && op.peer == other;
    case OpKind::send: return op.kind != OpKind::coalesced && op.peer == other;
    default: return false;
  }
}

std::string rangeName(const Operation& op, const Group& group, int rank, bool onAccelerator) {
  if (onAccelerator) {
    const auto* const recorded =
        op.kind == OpKind::coalesced ? traits(op.parts).recordedBatch : traits(op.kind).recorded;
    const std::string text = std::string("nccl:") + (recorded ? recorded : name(op.kind));
    const bool sends = op.kind == OpKind::send;
    return sends || op.kind == OpKind::recv
               ? text + " " + std::to_string(rank) + (sends ? "->" : "<-") + std::to_string(op.peer)
               : text;
  }
  if (!group.standsForGloo()) {
    return traits(op.kind).title;
  }
  if (op.kind == OpKind::recv && op.peer < 0) {
    return "gloo:recvAnySource";
  }
  return traits(op.kind == OpKind::coalesced ? op.parts : op.kind).titleOfGloo;
}

const char* profileName(const Operation& op) {
  if (op.kind != OpKind::coalesced) {
    return traits(op.kind).profile;
  }
  return op.parts == OpKind::allGatherSingle ? "allgather_into_tensor_coalesced"
                                             : traits(op.parts).recordedBatch;
}

std::pair<int64_t, int64_t> profileSizes(const Operation& op, int size) {
  switch (op.kind) {
    case OpKind::gather:
    case OpKind::gatherSingle: return {op.numelIn, op.numelIn * size};
    case OpKind::scatter: return {op.numelOut * size, op.numelOut};
    case OpKind::send: return {op.numelIn, op.numelIn};
    case OpKind::recv: return {op.numelOut, op.numelOut};
    default: return {op.numelIn, op.numelOut};
  }
}

std::string describe(const Operation& op) {
  TextWriter out;
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
  const bool message = isPointToPoint(op.kind);  // a message has one tensor
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

std::string signature(const Operation& op, bool sizes) {
  if (isPointToPoint(op.kind) || op.kind == OpKind::coalesced || isManagement(op.kind)) {
    return "";
  }
  std::string text = name(op.kind);
  if (hasData(op.kind)) {
    text += std::string(" ") + c10::toString(op.dtype);
    text += op.reduceOp == nullptr ? "" : std::string(" ") + op.reduceOp;
    text += op.peer < 0 ? "" : " root " + std::to_string(op.peer);
  }
  if (sizes && sameSizes(op.kind)) {
    text += " of " + std::to_string(op.numelIn);
  }
  return text;
}

}  // namespace torchcomms_pg
