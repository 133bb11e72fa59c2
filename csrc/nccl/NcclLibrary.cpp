#include "nccl/NcclLibrary.hpp"

#include "nccl/ElementSize.hpp"

namespace torchcomms_pg {

namespace {

// The messages that this rank sends, or those that it receives: one for each rank from `first` up
// to, but without, `last`. Their data are `step` bytes apart.
struct Side {
  const void* data;
  size_t step;
  int first;
  int last;
};

ncclResult_t exchange(
    const Library& library, const Side& in, const Side& out, size_t count, ncclDataType_t type,
    ncclComm_t comm, cudaStream_t stream) {
  return library.grouped([&] {
    for (const bool sending : {true, false}) {
      const auto& side = sending ? in : out;
      auto* data = static_cast<char*>(const_cast<void*>(side.data));
      for (int peer = side.first; peer < side.last; ++peer, data += side.step) {
        const auto result = library.run({sending, data, count, type, peer}, comm, stream);
        if (result != ncclSuccess) {
          return result;
        }
      }
    }
    return ncclSuccess;
  });
}

// Does the work of ncclAlltoAll, ncclGather or ncclScatter for a library without that function.
ncclResult_t sendAndReceive(
    const Library& library, const Collective& c, ncclComm_t comm, cudaStream_t stream) {
  int rank = 0;
  int size = 0;
  auto result = library.commUserRank(comm, &rank);
  if (result == ncclSuccess) {
    result = library.commCount(comm, &size);
  }
  if (result != ncclSuccess) {
    return result;
  }
  const size_t step = c.count * elementSize(c.type);
  Side in{c.input, step, 0, size};
  Side out{c.output, step, 0, size};
  const int last = rank == c.root ? size : 0;
  if (c.kind == CollectiveKind::gather) {
    in = {c.input, 0, c.root, c.root + 1};
    out.last = last;
  } else if (c.kind == CollectiveKind::scatter) {
    in.last = last;
    out = {c.output, 0, c.root, c.root + 1};
  }
  return exchange(library, in, out, c.count, c.type, comm, stream);
}

ncclResult_t launch(
    const Library& library, const NcclApi& api, const Collective& c, ncclRedOp_t op,
    ncclComm_t comm, cudaStream_t stream) {
  const auto& [kind, in, out, count, type, root, made, whole] = c;
  switch (kind) {
    case CollectiveKind::allReduce: return api.allReduce(in, out, count, type, op, comm, stream);
    case CollectiveKind::reduceScatter:
      return api.reduceScatter(in, out, count, type, op, comm, stream);
    case CollectiveKind::reduce: return api.reduce(in, out, count, type, op, root, comm, stream);
    case CollectiveKind::allGather: return api.allGather(in, out, count, type, comm, stream);
    case CollectiveKind::broadcast: return api.broadcast(in, out, count, type, root, comm, stream);
    case CollectiveKind::allToAll:
      return api.allToAll != nullptr ? api.allToAll(in, out, count, type, comm, stream)
                                     : sendAndReceive(library, c, comm, stream);
    case CollectiveKind::gather:
      return api.gather != nullptr ? api.gather(in, out, count, type, root, comm, stream)
                                   : sendAndReceive(library, c, comm, stream);
    case CollectiveKind::scatter:
      return api.scatter != nullptr ? api.scatter(in, out, count, type, root, comm, stream)
                                    : sendAndReceive(library, c, comm, stream);
    case CollectiveKind::split:
    case CollectiveKind::window:
    case CollectiveKind::barrier: break;
  }
  return ncclInvalidUsage;
}

// Calls body(op) with NCCL's handle for an operator, and returns its result. The handle is valid
// only inside `body`, for collectives of `type`.
template <class Body>
ncclResult_t withOperator(
    const NcclApi& api, const Operator& op, ncclDataType_t type, ncclComm_t comm,
    const Body& body) {
  if (!op.scaled) {
    return body(op.reduction);
  }
  const bool onDevice = op.scalarAddress != nullptr;
  void* const scalar =
      onDevice ? const_cast<void*>(op.scalarAddress) : const_cast<std::byte*>(op.scalar.data());
  auto made = ncclSum;
  const auto result = api.redOpCreatePreMulSum(
      &made, scalar, type, onDevice ? ncclScalarDevice : ncclScalarHostImmediate, comm);
  if (result != ncclSuccess) {
    return result;
  }
  const auto called = body(made);
  api.redOpDestroy(made, comm);
  return called;
}

}  // namespace

bool NcclLibrary::has(Feature feature) const {
  switch (feature) {
    case Feature::severalIds: return table_.commInitRankScalable != nullptr;
    case Feature::allocator: return table_.memAlloc != nullptr && table_.memFree != nullptr;
    case Feature::registration: return table_.commRegister != nullptr;
    case Feature::windowRegistration: return table_.commWindowRegister != nullptr;
    case Feature::windows:
      return table_.commWindowRegister != nullptr && table_.signal != nullptr &&
             table_.waitSignal != nullptr && table_.getPeerDevicePointer != nullptr;
    case Feature::shrink: return table_.commShrink != nullptr;
    case Feature::revoke: return table_.commRevoke != nullptr;
    case Feature::suspend: return table_.commSuspend != nullptr;
    case Feature::resume: return table_.commResume != nullptr;
    case Feature::memoryStats: return table_.commMemStats != nullptr;
    case Feature::barrier:
    case Feature::tags:
    case Feature::deferral:
    case Feature::fail:
    case Feature::missingRanks:
    case Feature::ring:
    case Feature::probe: break;
  }
  return false;
}

int NcclLibrary::version() const {
  int version = 0;
  table_.getVersion(&version);
  return version;
}

ncclResult_t NcclLibrary::init(
    ncclComm_t* made, std::span<ncclUniqueId> ids, int ranks, int rank,
    ncclConfig_t* config) const {
  return ids.size() == 1 ? table_.commInitRankConfig(made, ranks, ids.front(), rank, config)
                         : call(
                               table_.commInitRankScalable, made, ranks, rank,
                               static_cast<int>(ids.size()), ids.data(), config);
}

ncclResult_t NcclLibrary::shrink(
    ncclComm_t comm, std::span<int> excluded, ncclComm_t* made, ncclConfig_t* config, int flags,
    std::chrono::steady_clock::time_point /*deadline*/) const {
  const auto count = static_cast<int>(excluded.size());
  return call(table_.commShrink, comm, excluded.data(), count, made, config, flags);
}

ncclResult_t NcclLibrary::run(const Collective& c, ncclComm_t comm, cudaStream_t stream) const {
  return withOperator(table_, c.op, c.type, comm, [&](ncclRedOp_t op) {
    return launch(*this, table_, c, op, comm, stream);
  });
}

ncclResult_t NcclLibrary::runGrouped(
    std::span<const Collective> collectives, ncclComm_t comm, cudaStream_t stream) const {
  const auto& first = collectives.front();
  return withOperator(table_, first.op, first.type, comm, [&](ncclRedOp_t op) {
    return grouped(collectives, [&](const Collective& c) {
      return launch(*this, table_, c, op, comm, stream);
    });
  });
}

ncclResult_t NcclLibrary::run(const Message& m, ncclComm_t comm, cudaStream_t stream) const {
  return m.sending ? table_.send(m.buffer, m.count, m.type, m.peer, comm, stream)
                   : table_.recv(m.buffer, m.count, m.type, m.peer, comm, stream);
}

}  // namespace torchcomms_pg
