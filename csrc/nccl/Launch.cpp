#include "nccl/Launch.hpp"

#include "nccl/ElementSize.hpp"

namespace torchcomms_pg {

namespace {

// The messages of one direction: one for each rank from `first` to before `last`, `step` bytes
// apart in memory.
struct Side {
  const void* data;
  size_t step;
  int first;
  int last;
};

ncclResult_t exchange(
    const NcclApi& api,
    const Side& in,
    const Side& out,
    size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream) {
  return grouped(api, [&] {
    const auto* from = static_cast<const char*>(in.data);
    for (int peer = in.first; peer < in.last; ++peer, from += in.step) {
      const auto result = api.send(from, count, type, peer, comm, stream);
      if (result != ncclSuccess) {
        return result;
      }
    }
    auto* to = static_cast<char*>(const_cast<void*>(out.data));
    for (int peer = out.first; peer < out.last; ++peer, to += out.step) {
      const auto result = api.recv(to, count, type, peer, comm, stream);
      if (result != ncclSuccess) {
        return result;
      }
    }
    return ncclSuccess;
  });
}

// Does the work of ncclAlltoAll, ncclGather or ncclScatter for a library that lacks it.
ncclResult_t sendAndReceive(
    const NcclApi& api, const Collective& c, ncclComm_t comm, cudaStream_t stream) {
  int rank = 0;
  int size = 0;
  auto result = api.commUserRank(comm, &rank);
  if (result == ncclSuccess) {
    result = api.commCount(comm, &size);
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
  return exchange(api, in, out, c.count, c.type, comm, stream);
}

ncclResult_t call(
    const NcclApi& api, const Collective& c, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
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
                                     : sendAndReceive(api, c, comm, stream);
    case CollectiveKind::gather:
      return api.gather != nullptr ? api.gather(in, out, count, type, root, comm, stream)
                                   : sendAndReceive(api, c, comm, stream);
    case CollectiveKind::scatter:
      return api.scatter != nullptr ? api.scatter(in, out, count, type, root, comm, stream)
                                    : sendAndReceive(api, c, comm, stream);
    case CollectiveKind::split:
    case CollectiveKind::window:
    case CollectiveKind::barrier: break;
  }
  return ncclInvalidUsage;
}

// Calls body(op) with NCCL's handle for an operator. All collectives of `body` have `type`.
template <class Body>
ncclResult_t withOperator(
    const NcclApi& api,
    const Operator& op,
    ncclDataType_t type,
    ncclComm_t comm,
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

ncclResult_t callNccl(
    const NcclApi& api, const Collective& c, ncclComm_t comm, cudaStream_t stream) {
  return withOperator(
      api, c.op, c.type, comm, [&](ncclRedOp_t op) { return call(api, c, op, comm, stream); });
}

ncclResult_t runGrouped(
    const NcclApi& api,
    std::span<const Collective> collectives,
    ncclComm_t comm,
    cudaStream_t stream) {
  const auto launch = [&](const auto& one) {
    return grouped(api, [&] {
      auto result = ncclSuccess;
      for (const auto& collective : collectives) {
        if (result == ncclSuccess) {
          result = one(collective);
        }
      }
      return result;
    });
  };
  if (api.collective != nullptr) {
    return launch([&](const Collective& c) { return api.collective(c, comm, stream); });
  }
  const auto& first = collectives.front();
  return withOperator(api, first.op, first.type, comm, [&](ncclRedOp_t op) {
    return launch([&](const Collective& c) { return call(api, c, op, comm, stream); });
  });
}

}  // namespace torchcomms_pg
