// Launch of operations with every library. Stands in for what a libnccl lacks: messages in one
// group, as NCCL documents it.
#pragma once

#include <span>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Calls NCCL's function for a collective, or sends and receives in one group if the library lacks
// it. Returns ncclInvalidUsage for a barrier, which NCCL lacks: its caller reduces one element
// instead.
ncclResult_t callNccl(
    const NcclApi& api, const Collective& collective, ncclComm_t comm, cudaStream_t stream);

// Launches a collective in the order of `stream`.
inline ncclResult_t run(
    const NcclApi& api, const Collective& collective, ncclComm_t comm, cudaStream_t stream) {
  return api.collective != nullptr ? api.collective(collective, comm, stream)
                                   : callNccl(api, collective, comm, stream);
}

// Launches collectives of one type and one operator in one group, up to the first error.
ncclResult_t runGrouped(
    const NcclApi& api,
    std::span<const Collective> collectives,
    ncclComm_t comm,
    cudaStream_t stream);

// Sends or receives one message in the order of `stream`. Host libraries match it by its tag, NCCL
// by its order alone.
inline ncclResult_t run(
    const NcclApi& api,
    bool sending,
    const Message& message,
    ncclComm_t comm,
    cudaStream_t stream) {
  if (api.sendTagged != nullptr) {
    return sending ? api.sendTagged(message, comm, stream) : api.recvTagged(message, comm, stream);
  }
  const auto& [buffer, count, type, peer, tag, confirmed, done, context, deferred] = message;
  return sending ? api.send(buffer, count, type, peer, comm, stream)
                 : api.recv(buffer, count, type, peer, comm, stream);
}

// Calls `body` between ncclGroupStart and ncclGroupEnd. Ends the group also after an error.
template <class Body>
ncclResult_t grouped(const NcclApi& api, Body&& body) {
  const auto started = api.groupStart();
  if (started != ncclSuccess) {
    return started;
  }
  const auto result = body();
  const auto ended = api.groupEnd();
  return result != ncclSuccess ? result : ended;
}

}  // namespace torchcomms_pg
