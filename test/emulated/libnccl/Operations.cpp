// Collectives, messages and signals (src/collectives.cc, src/enqueue.cc).
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "host/HostStream.hpp"
#include "libcudart/Emulated.hpp"
#include "libnccl/Communicator.hpp"
#include "libnccl/Groups.hpp"
#include "libnccl/Misuse.hpp"
#include "libnccl/Version.hpp"

#define EMULATED_API extern "C" __attribute__((visibility("default")))

namespace emulated {

namespace {

constexpr int kNoPeer = -1;

bool hasType(ncclDataType_t type) {
  const int types = ncclVersion() >= NCCL_VERSION(2, 24, 3) ? 12 : 10;  // without float8
  return type >= 0 && type < types;
}

// A stream with the kernels of one communicator, which spin where a peer never comes.
class Kernels final : public torchcomms_pg::host::HostStream {
 public:
  Kernels(Comm& comm, HostStream& stream) : comm_(comm), stream_(stream) {}

  void enqueue(std::function<void()> task) override {
    stream_.enqueue([this, late = comm_.revoked.load(), task = std::move(task)] {
      failed_ = false;
      ++counts().begun;
      task();
      spin(comm_, failed_, late);
    });
  }
  void failed() override { failed_ = true; }
  bool idle() override { return stream_.idle(); }
  bool capture(const std::function<void()>& issue) override { return stream_.capture(issue); }

  // Returns those of the communicator in the stream. Never freed: graphs keep them.
  static Kernels& of(Comm& comm, HostStream& stream) {
    static auto* const mutex = new std::mutex;
    static auto* const all = new std::map<std::pair<Comm*, HostStream*>, Kernels*>;
    const std::lock_guard lock(*mutex);
    auto*& found = (*all)[{&comm, &stream}];
    if (found == nullptr) found = new Kernels(comm, stream);
    return *found;
  }

 private:
  Comm& comm_;
  HostStream& stream_;
  inline static thread_local bool failed_ = false;  // of the task that the thread runs
};

// ncclEnqueueCheck: the communicator, that it is ready, then the arguments
// (src/argcheck.cc, ArgsCheck; what csrc/shm refuses comes with the launch).
// `launch` gets the stream as csrc/shm wants it. `peer`: a root, too.
template <class Launch>
ncclResult_t operate(
    ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, int peer, const char* function,
    Launch&& launch) {
  if (const auto error = check(comm, function)) {
    failGroup(error);
    return error;
  }
  const Inside inside(*comm, function);
  const auto fail = [&](ncclResult_t error, const std::string& why) {
    failGroup(error);
    return refused(*comm, error, why.empty() ? why : std::string(function) + " : " + why);
  };
  if (const auto error = ensureReady(*comm, function)) return fail(error, "");
  if (comm->revoked) return fail(ncclInvalidUsage, "the communicator is revoked");
  if (comm->suspended) return fail(ncclInvalidUsage, "the communicator is suspended");
  if (!hasType(type)) return fail(ncclInvalidArgument, "invalid type " + std::to_string(type));
  if (peer != kNoPeer && (peer < 0 || peer >= comm->size)) {
    return fail(ncclInvalidArgument, "invalid root or peer " + std::to_string(peer));
  }
  auto* const host = hostStream(stream);
  if (host == nullptr || captureStatus(stream) == cudaStreamCaptureStatusInvalidated) {
    return fail(ncclUnhandledCudaError, "the stream is none, or its capture was invalidated");
  }
  const bool captured = captureStatus(stream) == cudaStreamCaptureStatusActive;
  if (captured) {
    ++comm->persistent;
    keepWithGraph(stream, std::shared_ptr<void>(comm, [](void* held) {
                    auto& comm = *static_cast<Comm*>(held);
                    // src/enqueue.cc, persistentDestructor: enqueues into comm->callbackQueue.
                    if (comm.freed) misuse("a graph's end", "its communicator has been freed");
                    --comm.persistent;
                    comm.persistent.notify_all();
                  }));
  }
  return submit(
      {comm,
       /*setup=*/false,
       [=, at = Kernels::of(*comm, *host).handle()] { return launch(comm->shm.load(), at); },
       comm->device, captured ? nullptr : host});
}

}  // namespace

}  // namespace emulated

using namespace emulated;

EMULATED_API ncclResult_t ncclAllReduce(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
    cudaStream_t stream) {
  return operate(comm, stream, type, kNoPeer, __func__, [=](auto joined, auto at) {
    return shm().allReduce(in, out, count, type, op, joined, at);
  });
}

EMULATED_API ncclResult_t ncclAllGather(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  return operate(comm, stream, type, kNoPeer, __func__, [=](auto joined, auto at) {
    return shm().allGather(in, out, count, type, joined, at);
  });
}

EMULATED_API ncclResult_t ncclReduceScatter(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
    cudaStream_t stream) {
  return operate(comm, stream, type, kNoPeer, __func__, [=](auto joined, auto at) {
    return shm().reduceScatter(in, out, count, type, op, joined, at);
  });
}

EMULATED_API ncclResult_t ncclBroadcast(
    const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  return operate(comm, stream, type, root, __func__, [=](auto joined, auto at) {
    return shm().broadcast(in, out, count, type, root, joined, at);
  });
}

EMULATED_API ncclResult_t ncclBcast(
    void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

EMULATED_API ncclResult_t ncclReduce(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
    ncclComm_t comm, cudaStream_t stream) {
  return operate(comm, stream, type, root, __func__, [=](auto joined, auto at) {
    return shm().reduce(in, out, count, type, op, root, joined, at);
  });
}

EMULATED_API ncclResult_t ncclAlltoAll(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  if (!hasFunction(__func__, 22803)) return ncclInvalidUsage;
  return operate(comm, stream, type, kNoPeer, __func__, [=](auto joined, auto at) {
    return shm().allToAll(in, out, count, type, joined, at);
  });
}

EMULATED_API ncclResult_t ncclGather(
    const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  if (!hasFunction(__func__, 22803)) return ncclInvalidUsage;
  return operate(comm, stream, type, root, __func__, [=](auto joined, auto at) {
    return shm().gather(in, out, count, type, root, joined, at);
  });
}

EMULATED_API ncclResult_t ncclScatter(
    const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  if (!hasFunction(__func__, 22803)) return ncclInvalidUsage;
  return operate(comm, stream, type, root, __func__, [=](auto joined, auto at) {
    return shm().scatter(in, out, count, type, root, joined, at);
  });
}

EMULATED_API ncclResult_t ncclSend(
    const void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  return operate(comm, stream, type, peer, __func__, [=](auto joined, auto at) {
    return shm().send(buffer, count, type, peer, joined, at);
  });
}

EMULATED_API ncclResult_t ncclRecv(
    void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  return operate(comm, stream, type, peer, __func__, [=](auto joined, auto at) {
    return shm().recv(buffer, count, type, peer, joined, at);
  });
}

EMULATED_API ncclResult_t ncclPutSignal(
    const void* data, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
    size_t offset, int signal, int context, unsigned flags, ncclComm_t comm, cudaStream_t stream) {
  if (!hasFunction(__func__, 22902)) return ncclInvalidUsage;
  return operate(comm, stream, type, peer, __func__, [=](auto joined, auto at) {
    return shm().putSignal(
        data, count, type, peer, window, offset, signal, context, flags, joined, at);
  });
}

EMULATED_API ncclResult_t ncclSignal(
    int peer, int signal, int context, unsigned flags, ncclComm_t comm, cudaStream_t stream) {
  if (!hasFunction(__func__, 22902)) return ncclInvalidUsage;
  return operate(comm, stream, ncclInt8, peer, __func__, [=](auto joined, auto at) {
    return shm().signal(peer, signal, context, flags, joined, at);
  });
}

EMULATED_API ncclResult_t ncclWaitSignal(
    int count, ncclWaitSignalDesc_t* descriptions, ncclComm_t comm, cudaStream_t stream) {
  if (!hasFunction(__func__, 22902)) return ncclInvalidUsage;
  if (descriptions == nullptr || count < 1) return ncclInvalidArgument;
  const std::vector<ncclWaitSignalDesc_t> all(descriptions, descriptions + count);
  return operate(comm, stream, ncclInt8, kNoPeer, __func__, [=](auto joined, auto at) {
    auto mine = all;
    return shm().waitSignal(count, mine.data(), joined, at);
  });
}

// Local; the task copies the operator, so that it may be destroyed right after the launch.
EMULATED_API ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
    ncclComm_t comm) {
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  if (const auto error = ensureReady(*comm, __func__)) return error;
  return shm().redOpCreatePreMulSum(op, scalar, type, residence, comm->shm);
}

EMULATED_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  return shm().redOpDestroy(op, comm->shm);
}
