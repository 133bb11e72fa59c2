#include "shm/api/Api.hpp"

#include "base/NeverDestroyed.hpp"
#include "shm/Host.hpp"
#include "shm/Window.hpp"
#include "shm/api/GroupCalls.hpp"
#include "shm/api/Management.hpp"
#include "shm/api/ResultCodes.hpp"
#include "shm/api/Validate.hpp"

namespace torchcomms_pg::shm {
namespace {

// Checks the arguments of one of NCCL's functions, and then runs the collective.
ncclResult_t checked(Collective c, ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  return withComm(handle, kindName(c.kind), [&](const auto& comm) {
    comm->checkUsable();
    checkCollective(c, *comm);
    if (op != ncclSum) {
      try {
        c.op = comm->operators().resolve(op, c.type);
      } catch (const NcclError& failure) {
        invalidArgument(kindName(c.kind), failure.what());
      }
    }
    return library().run(c, handle, stream);
  });
}

// Adds NCCL's functions that launch operations and group them. The lambdas' parameters have the
// types that nccl.h gives to the table's entries.
void addNcclCalls(NcclApi& t) {
  using Kind = CollectiveKind;

  t.allReduce = [](auto in, auto out, auto count, auto type, auto op, auto comm, auto stream) {
    return checked({Kind::allReduce, in, out, count, type}, op, comm, stream);
  };
  t.reduceScatter = [](auto in, auto out, auto count, auto type, auto op, auto comm, auto stream) {
    return checked({Kind::reduceScatter, in, out, count, type}, op, comm, stream);
  };
  t.reduce = [](auto in, auto out, auto count, auto type, auto op, auto root, auto comm,
                auto stream) {
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
    return library().run({true, const_cast<void*>(buffer), count, type, peer}, comm, stream);
  };
  t.recv = [](auto buffer, auto count, auto type, auto peer, auto comm, auto stream) {
    return library().run({false, buffer, count, type, peer}, comm, stream);
  };

  t.groupStart = [] {
    groupStart();
    return ncclSuccess;
  };
  t.groupEnd = [] { return guarded(groupEnd); };
}

// The library: calls the functions of the table, and implements the features that NCCL lacks.
class SharedMemory final : public Library {
 public:
  SharedMemory()
      : Library(
            ncclFunctions(), {Feature::barrier, Feature::tags, Feature::deferral, Feature::fail,
                              Feature::missingRanks, Feature::ring}) {}

  int signals() const override { return kSignals; }

  ncclResult_t run(const Collective& c, ncclComm_t handle, cudaStream_t stream) const override {
    return withComm(handle, kindName(c.kind), [&](const auto& comm) {
      comm->checkUsable();
      if (stream == nullptr && !groupOpen()) {
        comm->run(c);  // allocates nothing, unlike issue()
      } else {
        issue({comm, stream, c});
      }
    });
  }
  ncclResult_t run(const Message& message, ncclComm_t handle, cudaStream_t stream) const override {
    const char* operation = message.sending ? "send" : "recv";
    return withComm(handle, operation, [&](const auto& comm) {
      comm->checkUsable();
      checkType(operation, message.type);
      if (message.sending || message.peer != kAnyPeer) {
        checkRank(operation, "peer", message.peer, comm->size());
      }
      checkCount(operation, message.count);
      checkBuffer(
          operation, message.sending ? "sendbuff" : "recvbuff", message.buffer, message.count);
      issue({comm, stream, std::make_shared<Transfer>(message)});
    });
  }

  ncclResult_t shrink(
      ncclComm_t handle, std::span<int> excluded, ncclComm_t* made, ncclConfig_t* config, int flags,
      std::chrono::steady_clock::time_point deadline) const override {
    return withComm(handle, "commShrink", [&](const auto& comm) {
      return shm::shrink(*comm, excluded, made, config, flags, deadline);
    });
  }

  std::vector<int> missingRanks(ncclComm_t handle) const override {
    std::vector<int> absent;
    withComm(handle, "missingRanks", [&](const auto& comm) { absent = comm->missingRanks(); });
    return absent;
  }

  void moveMessages(ncclComm_t handle, const std::function<bool()>& ended) const override {
    withComm(
        handle, "moveMessages", [&](const auto& comm) { comm->pointToPoint().moveUntil(ended); });
  }

  void serveMessages(ncclComm_t handle) const override {
    withComm(
        handle, "serveMessages", [](const auto& comm) { comm->pointToPoint().serveDeferred(); });
  }

  bool published(ncclComm_t handle) const override {
    bool published = false;
    withComm(handle, "published", [&](const auto& comm) { published = comm->begun(); });
    return published;
  }

  uint64_t ring(ncclComm_t handle, uint64_t times) const override {
    uint64_t rings = 0;
    withComm(handle, "ring", [&](const auto& comm) {
      rings = comm->segment().header().doorbell.fetch_add(times) + times;
    });
    return rings;
  }

  ncclResult_t fail(
      ncclComm_t handle, ncclResult_t result, const std::string& reason,
      const std::vector<int>& ranks) const override {
    return withComm(handle, "fail", [&](const auto& comm) {
      const bool error = result != ncclSuccess && result != ncclInProgress;
      checkValue("fail", "result", result, error, "an error");
      for (const int rank : ranks) {
        if (rank < 0 || rank >= comm->size()) {
          invalidArgument(
              "fail", "ranks holds " + std::to_string(rank) + ", no rank of this communicator");
        }
      }
      comm->fail(NcclError(result, reason, ranks));
    });
  }

  ncclResult_t put(
      const void* data, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
      size_t offset, ncclComm_t handle, cudaStream_t stream) const override {
    return table_.putSignal(
        data, count, type, peer, window, offset, kNoSignal, 0, 0, handle, stream);
  }

  ncclResult_t windowView(
      ncclComm_t handle, ncclWindow_t window, int peer, WindowView& view) const override {
    constexpr const char* kName = "windowView";
    return withComm(handle, kName, [&](const auto& comm) {
      checkRank(kName, "peer", peer, comm->size());
      view = comm->windows().find(window, kName)->at(peer);
    });
  }
};

}  // namespace

const NcclApi& ncclFunctions() {
  static const NcclApi table = [] {
    NcclApi t;
    addManagement(t);
    addWindows(t);
    addNcclCalls(t);
    return t;
  }();
  return table;
}

const Library& oldNccl() {
  static const auto& instance = neverDestroyed<Library>([] {
    auto table = ncclFunctions();
    table.allToAll = nullptr;
    table.gather = nullptr;
    table.scatter = nullptr;
    return table;
  }());
  return instance;
}

const Library& library() {
  static const auto& instance = neverDestroyed<SharedMemory>();
  return instance;
}

}  // namespace torchcomms_pg::shm
