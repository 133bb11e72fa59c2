#include "shm/api/Api.hpp"

#include "shm/Host.hpp"
#include "shm/Window.hpp"
#include "shm/api/Group.hpp"
#include "shm/api/Management.hpp"
#include "shm/api/ResultCodes.hpp"
#include "shm/api/Validate.hpp"

namespace torchcomms_pg::shm {
namespace {

ncclResult_t collective(const Collective& c, ncclComm_t handle, cudaStream_t stream) {
  return withComm(handle, kindName(c.kind), [&](const std::shared_ptr<Comm>& comm) {
    comm->checkUsable();
    if (stream == nullptr && !groupOpen()) {
      comm->run(c);  // the short cut: no allocation
    } else {
      issue({comm, stream, c});
    }
    return ncclSuccess;
  });
}

// Checks the arguments of one of NCCL's functions, and then runs the collective.
ncclResult_t checked(Collective c, ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  return withComm(handle, kindName(c.kind), [&](const std::shared_ptr<Comm>& comm) {
    comm->checkUsable();
    checkCollective(c, *comm);
    if (op != ncclSum) {
      try {
        c.op = comm->operators().resolve(op, c.type);
      } catch (const NcclError& failure) {
        invalidArgument(kindName(c.kind), failure.what());
      }
    }
    return collective(c, handle, stream);
  });
}

ncclResult_t transfer(
    bool sending, const Message& message, ncclComm_t handle, cudaStream_t stream) {
  const char* operation = sending ? "send" : "recv";
  return withComm(handle, operation, [&](const std::shared_ptr<Comm>& comm) {
    comm->checkUsable();
    checkType(operation, message.type);
    if (sending || message.peer != kAnyPeer) {
      checkRank(operation, "peer", message.peer, comm->size());
    }
    if (message.count > PTRDIFF_MAX / 8) {
      invalidArgument(
          operation, "count is " + std::to_string(message.count) + ", which no memory can hold");
    }
    checkBuffer(operation, sending ? "sendbuff" : "recvbuff", message.buffer, message.count);
    issue({comm, stream, std::make_shared<Transfer>(sending, message)});
    return ncclSuccess;
  });
}

// Adds NCCL's own functions: for tests, and for devices that are simulated as if by an old NCCL.
// The lambdas' parameters get their types from the entries, and so from nccl.h.
void addNcclCalls(NcclApi& t) {
  using Kind = CollectiveKind;

  t.allReduce = [](auto in, auto out, auto count, auto type, auto op, auto comm, auto stream) {
    return checked({Kind::allReduce, in, out, count, type}, op, comm, stream);
  };
  t.reduceScatter = [](auto in, auto out, auto count, auto type, auto op, auto comm, auto stream) {
    return checked({Kind::reduceScatter, in, out, count, type}, op, comm, stream);
  };
  t.reduce =
      [](auto in, auto out, auto count, auto type, auto op, auto root, auto comm, auto stream) {
        return checked({Kind::reduce, in, out, count, type, root}, op, comm, stream);
      };

  t.allGather = [](auto in, auto out, auto count, auto type, auto comm, auto stream) {
    return checked({Kind::allGather, in, out, count, type}, ncclSum, comm, stream);
  };
  t.allToAll = [](auto in, auto out, auto count, auto type, auto comm, auto stream) {
    return checked({Kind::allToAll, in, out, count, type}, ncclSum, comm, stream);
  };

  t.broadcast = [](auto in, auto out, auto count, auto type, auto root, auto comm, auto stream) {
    return checked({Kind::broadcast, in, out, count, type, root}, ncclSum, comm, stream);
  };
  t.gather = [](auto in, auto out, auto count, auto type, auto root, auto comm, auto stream) {
    return checked({Kind::gather, in, out, count, type, root}, ncclSum, comm, stream);
  };
  t.scatter = [](auto in, auto out, auto count, auto type, auto root, auto comm, auto stream) {
    return checked({Kind::scatter, in, out, count, type, root}, ncclSum, comm, stream);
  };

  t.send = [](auto buffer, auto count, auto type, auto peer, auto comm, auto stream) {
    return transfer(true, {const_cast<void*>(buffer), count, type, peer}, comm, stream);
  };
  t.recv = [](auto buffer, auto count, auto type, auto peer, auto comm, auto stream) {
    return transfer(false, {buffer, count, type, peer}, comm, stream);
  };
}

ncclResult_t startGroup() {
  groupStart();
  return ncclSuccess;
}

ncclResult_t endGroup() {
  return guarded([] {
    groupEnd();
    return ncclSuccess;
  });
}

}  // namespace

const NcclApi& api() {
  static const NcclApi table = [] {
    NcclApi t;
    addManagement(t);
    addWindows(t);
    addNcclCalls(t);
    t.collective = collective;
    t.sendTagged = [](const Message& message, ncclComm_t comm, cudaStream_t stream) {
      return transfer(true, message, comm, stream);
    };
    t.recvTagged = [](const Message& message, ncclComm_t comm, cudaStream_t stream) {
      return transfer(false, message, comm, stream);
    };
    t.groupStart = startGroup;
    t.groupEnd = endGroup;
    return t;
  }();
  return table;
}

}  // namespace torchcomms_pg::shm
