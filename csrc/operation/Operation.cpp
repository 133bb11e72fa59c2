#include "operation/Operation.hpp"

#include <algorithm>
#include <iterator>

#include "base/TextStreams.hpp"
#include "base/TorchCompat.hpp"

namespace torchcomms_pg {

namespace {

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
  using Kind = OpKind;
  using Type = c10d::OpType;
  using Hook = OpName;
  // In the order of OpKind.
  static constexpr OpTraits kTraits[] = {
      {Kind::allReduce, "all_reduce", Type::ALLREDUCE, Hook::all_reduce, "all_reduce", "allreduce",
       "allreduce_coalesced"},
      {Kind::broadcast, "broadcast", Type::BROADCAST, Hook::broadcast, "broadcast"},
      {Kind::reduce, "reduce", Type::REDUCE, Hook::reduce, "reduce"},
      {Kind::allGather, "all_gather", Type::ALLGATHER, Hook::all_gather, "all_gather", "all_gather",
       "ALLGATHER_coalesced", "all_gather", Hook::all_gather_v},
      {Kind::allGatherSingle, "all_gather_single", Type::_ALLGATHER_BASE, Hook::all_gather_single,
       "_all_gather_base", "_allgather_base", "all_gather_into_tensor_coalesced", "all_gather"},
      {Kind::reduceScatter, "reduce_scatter", Type::REDUCE_SCATTER, Hook::reduce_scatter,
       "reduce_scatter", "reduce_scatter", "REDUCE_SCATTER_coalesced", "reduce_scatter",
       Hook::reduce_scatter_v},
      {Kind::reduceScatterSingle, "reduce_scatter_single", Type::_REDUCE_SCATTER_BASE,
       Hook::reduce_scatter_single, "_reduce_scatter_base", "_reduce_scatter_base",
       "reduce_scatter_tensor_coalesced"},
      {Kind::allToAll, "all_to_all", Type::ALLTOALL, Hook::all_to_all, "all_to_all"},
      {Kind::allToAllSingle, "all_to_all_single", Type::ALLTOALL_BASE, Hook::all_to_all_single,
       "all_to_all", "all_to_allv", kUnchecked, "all_to_all", Hook::all_to_all_v_single},
      {Kind::gather, "gather", Type::GATHER, Hook::gather, "gather"},
      {Kind::gatherSingle, "gather_single", Type::GATHER, Hook::gather_single, "gather", "gather",
       kUnchecked, "gather"},
      {Kind::scatter, "scatter", Type::SCATTER, Hook::scatter, "scatter"},
      {Kind::send, "send", Type::SEND, Hook::send, "send"},
      {Kind::recv, "recv", Type::RECV, Hook::recv, "recv"},
      {Kind::barrier, "barrier", Type::BARRIER, Hook::barrier, "all_reduce_barrier"},
      {Kind::monitoredBarrier, "monitored_barrier", Type::BARRIER, Hook::barrier,
       "all_reduce_barrier", "barrier", kUnchecked, "barrier"},
      {Kind::coalesced, "coalesced", Type::COALESCED, Hook::batch_op_issue, kUnchecked},
      {Kind::newWindow, "new_window", Type::UNKNOWN, Hook::new_window,
       kAnalyserKnowsSplits ? "new_window" : kUnchecked},
      {Kind::tensorRegister, "tensor_register", Type::UNKNOWN, Hook::tensor_register, kUnchecked},
      {Kind::tensorDeregister, "tensor_deregister", Type::UNKNOWN, Hook::tensor_deregister,
       kUnchecked},
      {Kind::put, "put", Type::UNKNOWN, Hook::put, "put"},
      {Kind::signal, "signal", Type::UNKNOWN, Hook::signal, "signal"},
      {Kind::waitSignal, "wait_signal", Type::UNKNOWN, Hook::wait_signal, "wait_signal"},
      {Kind::split, "split", Type::UNKNOWN, Hook::split,
       kAnalyserKnowsSplits ? "split" : kUnchecked},
      {Kind::shrink, "shrink", Type::UNKNOWN, Hook::shrink},
      {Kind::registerMemory, "register_mem_pool", Type::UNKNOWN},
      {Kind::suspend, "suspend", Type::UNKNOWN},
      {Kind::resume, "resume", Type::UNKNOWN},
      {Kind::initialization, "init", Type::UNKNOWN},
  };
  static_assert(std::size(kTraits) == kOpKinds);
  static_assert(std::ranges::all_of(
      kTraits, [](const auto& each) { return each.kind == static_cast<Kind>(&each - kTraits); }));
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
    case OpKind::gatherSingle:
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
    return std::string("torchcomms:") + name(op.kind);
  }
  if (op.kind == OpKind::recv && op.peer < 0) {
    return "gloo:recvAnySource";
  }
  return std::string("gloo:") + traits(op.kind == OpKind::coalesced ? op.parts : op.kind).gloo;
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
