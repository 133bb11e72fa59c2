// NCCL's collectives and messages, with its signatures, for libraries that describe an operation by
// a Collective or a Message.
#pragma once

#include "host/Collective.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::host {

using CollectiveCall =
    ncclResult_t(Collective collective, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
using MessageCall =
    ncclResult_t(bool sending, const Message& message, ncclComm_t comm, cudaStream_t stream);

// Fills in those entries of `t` that call `collective` or `message`. The lambdas' parameters get
// their types from the entries, and so from nccl.h.
template <CollectiveCall* collective, MessageCall* message>
void addCalls(NcclApi& t) {
  using Kind = CollectiveKind;

  t.allReduce = [](auto in, auto out, auto count, auto type, auto op, auto comm, auto stream) {
    return collective({Kind::allReduce, in, out, count, type}, op, comm, stream);
  };
  t.reduceScatter = [](auto in, auto out, auto count, auto type, auto op, auto comm, auto stream) {
    return collective({Kind::reduceScatter, in, out, count, type}, op, comm, stream);
  };
  t.reduce =
      [](auto in, auto out, auto count, auto type, auto op, auto root, auto comm, auto stream) {
        return collective({Kind::reduce, in, out, count, type, root}, op, comm, stream);
      };

  t.allGather = [](auto in, auto out, auto count, auto type, auto comm, auto stream) {
    return collective({Kind::allGather, in, out, count, type}, ncclSum, comm, stream);
  };
  t.allToAll = [](auto in, auto out, auto count, auto type, auto comm, auto stream) {
    return collective({Kind::allToAll, in, out, count, type}, ncclSum, comm, stream);
  };
  t.barrier = [](auto comm, auto stream) {
    return collective({Kind::barrier}, ncclSum, comm, stream);
  };

  t.broadcast = [](auto in, auto out, auto count, auto type, auto root, auto comm, auto stream) {
    return collective({Kind::broadcast, in, out, count, type, root}, ncclSum, comm, stream);
  };
  t.gather = [](auto in, auto out, auto count, auto type, auto root, auto comm, auto stream) {
    return collective({Kind::gather, in, out, count, type, root}, ncclSum, comm, stream);
  };
  t.scatter = [](auto in, auto out, auto count, auto type, auto root, auto comm, auto stream) {
    return collective({Kind::scatter, in, out, count, type, root}, ncclSum, comm, stream);
  };

  t.send = [](auto buffer, auto count, auto type, auto peer, auto comm, auto stream) {
    return message(true, {const_cast<void*>(buffer), count, type, peer}, comm, stream);
  };
  t.recv = [](auto buffer, auto count, auto type, auto peer, auto comm, auto stream) {
    return message(false, {buffer, count, type, peer}, comm, stream);
  };
  t.sendTagged = [](auto& sent, auto comm, auto stream) {
    return message(true, sent, comm, stream);
  };
  t.recvTagged = [](auto& received, auto comm, auto stream) {
    return message(false, received, comm, stream);
  };
}

}  // namespace torchcomms_pg::host
