#include "nccl/Library.hpp"

namespace torchcomms_pg {

namespace {

// Does the work of ncclAlltoAll, ncclGather or ncclScatter for a library without that function.
ncclResult_t sendAndReceive(
    const Library& library, const Collective& c, ncclComm_t comm, cudaStream_t stream) {
  int rank = 0;
  int size = 0;
  for (const auto result : {library.commUserRank(comm, &rank), library.commCount(comm, &size)}) {
    if (result != ncclSuccess) {
      return result;
    }
  }
  return library.grouped([&] {
    for (const bool sending : {true, false}) {
      auto* const data = static_cast<char*>(sending ? const_cast<void*>(c.input) : c.output);
      // Either one message, with the root, or one with each rank.
      const bool one = c.kind == (sending ? CollectiveKind::gather : CollectiveKind::scatter);
      const bool each = c.kind == CollectiveKind::allToAll || rank == c.root;
      for (int peer = 0; peer < size; ++peer) {
        if (one ? peer != c.root : !each) {
          continue;
        }
        char* const part = one ? data : data + peer * c.count * elementSize(c.type);
        const auto result = library.run({sending, part, c.count, c.type, peer}, comm, stream);
        if (result != ncclSuccess) {
          return result;
        }
      }
    }
    return ncclSuccess;
  });
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

}  // namespace

Introduced introduced(Feature feature) {
  switch (feature) {
    case Feature::allocator: return {"ncclMemAlloc", "2.19.3"};
    case Feature::registration: return {"ncclCommRegister", "2.19.3"};
    case Feature::windowRegistration: return {"ncclCommWindowRegister", "2.27.3"};
    case Feature::windows:
      return {"ncclSignal, ncclWaitSignal or ncclGetPeerDevicePointer", "2.29.2"};
    case Feature::shrink: return {"ncclCommShrink", "2.27.3"};
    case Feature::revoke: return {"ncclCommRevoke", "2.28.7"};
    case Feature::suspend: return {"ncclCommSuspend", "2.29.7"};
    case Feature::resume: return {"ncclCommResume", "2.29.7"};
    case Feature::memoryStats: return {"ncclCommMemStats", "2.29.7"};
    default: return {"", ""};
  }
}

std::string versionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Library::Library(const NcclApi& table, std::initializer_list<Feature> beyond) : table_(table) {
  for (const auto feature : beyond) {
    beyond_ |= 1u << static_cast<int>(feature);
  }
}

bool Library::has(Feature feature) const {
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
    default: return (beyond_ >> static_cast<int>(feature) & 1) != 0;
  }
}

int Library::version() const {
  int version = 0;
  table_.getVersion(&version);
  return version;
}

ncclResult_t Library::init(
    ncclComm_t* made, std::span<ncclUniqueId> ids, int ranks, int rank,
    ncclConfig_t* config) const {
  return ids.size() == 1 ? call(table_.commInitRankConfig, made, ranks, ids.front(), rank, config)
                         : call(
                               table_.commInitRankScalable, made, ranks, rank,
                               static_cast<int>(ids.size()), ids.data(), config);
}

ncclResult_t Library::shrink(
    ncclComm_t comm, std::span<int> excluded, ncclComm_t* made, ncclConfig_t* config, int flags,
    std::chrono::steady_clock::time_point /*deadline*/) const {
  const auto count = static_cast<int>(excluded.size());
  return call(table_.commShrink, comm, excluded.data(), count, made, config, flags);
}

ncclResult_t Library::run(const Collective& c, ncclComm_t comm, cudaStream_t stream) const {
  if (!c.op.scaled) {
    return launch(*this, table_, c, c.op.reduction, comm, stream);
  }
  // NCCL's handle of the operator may be destroyed once the function that got it has returned, even
  // in an open group (nccl.h, ncclRedOpDestroy).
  const bool onDevice = c.op.scalarAddress != nullptr;
  void* const scalar =
      onDevice ? const_cast<void*>(c.op.scalarAddress) : const_cast<std::byte*>(c.op.scalar.data());
  auto made = ncclSum;
  const auto result = table_.redOpCreatePreMulSum(
      &made, scalar, c.type, onDevice ? ncclScalarDevice : ncclScalarHostImmediate, comm);
  if (result != ncclSuccess) {
    return result;
  }
  const auto launched = launch(*this, table_, c, made, comm, stream);
  table_.redOpDestroy(made, comm);
  return launched;
}

ncclResult_t Library::run(const Message& m, ncclComm_t comm, cudaStream_t stream) const {
  return m.sending ? table_.send(m.buffer, m.count, m.type, m.peer, comm, stream)
                   : table_.recv(m.buffer, m.count, m.type, m.peer, comm, stream);
}

}  // namespace torchcomms_pg
