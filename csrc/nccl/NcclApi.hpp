// The seam: NCCL's C API as a table of function pointers.
//
// Everything above this table communicates through it and does not know which library filled it in:
// libnccl, the shared-memory library (shm/api/Api.hpp), the Gloo library (gloo/Api.hpp), or a test
// that wraps one of them to inject errors and delays. The compiler checks every entry against
// nccl.h. An entry is null if the library lacks the function.
#pragma once

#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nccl/Collective.hpp"

#if !defined(NCCL_VERSION_CODE) || NCCL_VERSION_CODE < NCCL_VERSION(2, 28, 7)
#error \
    "torchcomms_pg needs nccl.h of NCCL 2.28.7 or later to build (an older libnccl still works at run time)"
#endif

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 2)
// Declares functions of newer versions: the table has them whatever header it was built with.
struct ncclWaitSignalDesc_t {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
};
extern "C" {
ncclResult_t ncclPutSignal(
    const void* data,
    size_t count,
    ncclDataType_t type,
    int peer,
    ncclWindow_t window,
    size_t offset,
    int sigIdx,
    int ctx,
    unsigned int flags,
    ncclComm_t comm,
    cudaStream_t stream);
ncclResult_t ncclSignal(
    int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclWaitSignal(
    int count, ncclWaitSignalDesc_t* descriptions, ncclComm_t comm, cudaStream_t stream);
}
#endif

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 7)
#define NCCL_SUSPEND_MEM 0x01
enum ncclCommMemStat_t {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
};
extern "C" {
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
ncclResult_t ncclCommResume(ncclComm_t comm);
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);
}
#endif

// nccl_device.h declares it since 2.29.2, but needs the CUDA headers. Sets a null pointer if loads
// and stores do not reach the peer.
extern "C" ncclResult_t ncclGetPeerDevicePointer(
    ncclWindow_t window, size_t offset, int peer, void** pointer);

namespace torchcomms_pg {

// X(field, function): functions of every NCCL since 2.18. A libnccl that lacks one is refused.
#define TORCHCOMMS_PG_NCCL_REQUIRED(X)              \
  X(getVersion, ncclGetVersion)                     \
  X(getUniqueId, ncclGetUniqueId)                   \
  X(getErrorString, ncclGetErrorString)             \
  X(getLastError, ncclGetLastError)                 \
  X(commInitRankConfig, ncclCommInitRankConfig)     \
  X(commFinalize, ncclCommFinalize)                 \
  X(commDestroy, ncclCommDestroy)                   \
  X(commAbort, ncclCommAbort)                       \
  X(commSplit, ncclCommSplit)                       \
  X(commGetAsyncError, ncclCommGetAsyncError)       \
  X(commCount, ncclCommCount)                       \
  X(commUserRank, ncclCommUserRank)                 \
  X(redOpCreatePreMulSum, ncclRedOpCreatePreMulSum) \
  X(redOpDestroy, ncclRedOpDestroy)                 \
  X(allReduce, ncclAllReduce)                       \
  X(allGather, ncclAllGather)                       \
  X(reduceScatter, ncclReduceScatter)               \
  X(broadcast, ncclBroadcast)                       \
  X(reduce, ncclReduce)                             \
  X(send, ncclSend)                                 \
  X(recv, ncclRecv)                                 \
  X(groupStart, ncclGroupStart)                     \
  X(groupEnd, ncclGroupEnd)

// X(field, function): functions of later versions; null if the loaded library lacks them.
#define TORCHCOMMS_PG_NCCL_OPTIONAL(X)              \
  X(memAlloc, ncclMemAlloc)                         \
  X(memFree, ncclMemFree)                           \
  X(commRegister, ncclCommRegister)                 \
  X(commDeregister, ncclCommDeregister)             \
  X(commInitRankScalable, ncclCommInitRankScalable) \
  X(commShrink, ncclCommShrink)                     \
  X(commWindowRegister, ncclCommWindowRegister)     \
  X(commWindowDeregister, ncclCommWindowDeregister) \
  X(allToAll, ncclAlltoAll)                         \
  X(gather, ncclGather)                             \
  X(scatter, ncclScatter)                           \
  X(commRevoke, ncclCommRevoke)                     \
  X(putSignal, ncclPutSignal)                       \
  X(signal, ncclSignal)                             \
  X(waitSignal, ncclWaitSignal)                     \
  X(getPeerDevicePointer, ncclGetPeerDevicePointer) \
  X(commSuspend, ncclCommSuspend)                   \
  X(commResume, ncclCommResume)                     \
  X(commMemStats, ncclCommMemStats)

// One tagged point-to-point message, see NcclApi::sendTagged.
struct Message {
  void* buffer = nullptr;  // read only when sending
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  int peer = 0;  // for recvTagged, kAnyPeer accepts the first sender
  int tag = 0;
  // True if the send ends when the message has been received, and not when the buffer may be
  // reused. Beyond a few hundred messages that are not yet received, further ones end as if it were
  // false. The receive of such a message has the same value.
  bool confirmed = false;
  // Called once if the call returns ncclSuccess, when the message has been delivered or has failed:
  // by this call, by moveMessages, or by another call or thread of the library that moves messages.
  // Never called if the call returns an error. Null if the call orders the message on its stream.
  void (*done)(void* context, ncclResult_t result, int peer) noexcept = nullptr;
  void* context = nullptr;
  // True for a message with `done` for which the library wakes no thread, once its peer has all
  // that it needs of this rank: the caller calls moveMessages or serveMessages for the rest.
  bool deferred = false;
};

inline constexpr int kAnyPeer = -1;

// Value of sigIdx for a putSignal without a signal; an extension of NCCL.
inline constexpr int kNoSignal = -1;

// The memory that one rank has registered with a window, mapped in this process.
struct WindowView {
  std::shared_ptr<std::byte> memory;  // keeps the mapping, also after the window's end
  size_t bytes = 0;
};

struct NcclApi {
#define TORCHCOMMS_PG_FIELD(field, function) decltype(&::function) field = nullptr;
  TORCHCOMMS_PG_NCCL_REQUIRED(TORCHCOMMS_PG_FIELD)
  TORCHCOMMS_PG_NCCL_OPTIONAL(TORCHCOMMS_PG_FIELD)
#undef TORCHCOMMS_PG_FIELD

  // Exclusive limit of sigIdx. NCCL guarantees 0 alone.
  int signals = 1;

  // Extensions of NCCL for libraries in host memory. Null in a table filled from libnccl.

  // Runs a collective in the order of `stream`. Copies the description, and does not check it. If
  // it is null, `run` (nccl/Launch.hpp) calls NCCL's function instead.
  ncclResult_t (*collective)(const Collective& collective, ncclComm_t comm, cudaStream_t stream) =
      nullptr;

  // Sends or receives a message with a tag. Messages of one pair and tag are matched in issue
  // order; different tags and different peers do not wait for each other. A message with `done` is
  // independent of every stream and may not be part of a group.
  ncclResult_t (*sendTagged)(const Message& message, ncclComm_t comm, cudaStream_t stream) =
      nullptr;
  ncclResult_t (*recvTagged)(const Message& message, ncclComm_t comm, cudaStream_t stream) =
      nullptr;

  // Moves messages with `done` in the calling thread until `ended` returns true. Some message's
  // `done` makes it true. Returns earlier if the communicator has failed or a signal interrupts the
  // thread. Null if a thread of the library moves them, deferred or not.
  void (*moveMessages)(ncclComm_t comm, const std::function<bool()>& ended) = nullptr;
  // Has a thread of the library move all messages that were deferred.
  void (*serveMessages)(ncclComm_t comm) = nullptr;

  // Returns the ranks, ascending, that the oldest unfinished operation of `comm` still waits for.
  // During initialization these are the ranks that have not joined; after a failure the ranks at
  // fault, if known. Callable from any thread at any time.
  std::vector<int> (*missingRanks)(ncclComm_t comm) = nullptr;
  // True if the ranks of missingRanks() certainly have not arrived. If false, they may have arrived
  // and wait for others themselves, or the data they sent is lost on a broken connection.
  bool absenceIsCertain = true;

  // Returns whether the operation issued last has published all its data for the other ranks, so
  // that they do not wait for the stream to execute it. Call from the thread that issued it.
  bool (*published)(ncclComm_t comm) = nullptr;

  // Declares the communicator failed on every rank, by the fault of `ranks` (may be empty). Blocked
  // and later calls return `result`, and getLastError returns `reason`. Callable from any thread at
  // any time; a communicator keeps its first failure.
  ncclResult_t (*fail)(
      ncclComm_t comm,
      ncclResult_t result,
      const std::string& reason,
      const std::vector<int>& ranks) = nullptr;

  // Does the same as ncclCommShrink, but returns ncclInProgress and makes no communicator if this
  // rank would wait past `deadline` for other remaining ranks.
  ncclResult_t (*shrinkUntil)(
      ncclComm_t comm,
      int* excluded,
      int excludedCount,
      ncclComm_t* made,
      ncclConfig_t* config,
      int flags,
      std::chrono::steady_clock::time_point deadline) = nullptr;

  // Looks for messages from ranks of other hosts while this rank waits for nothing: a failure,
  // which commGetAsyncError then reports, or a request to connect.
  struct Probe {
    // Returns true if the ranks that share ring()'s counter must look as well. `thorough` looks for
    // everything, also if nothing seems to be new. May block; call it from one thread; may outlive
    // the communicator.
    std::function<bool(bool thorough)> look;
    // Turn of this rank: the ranks that share ring()'s counter take turns in looking, one second
    // each.
    int turn = 0;
    int turns = 1;
  };
  // Returns the probe of `comm`. Null if the library needs none.
  Probe (*probe)(ncclComm_t comm) = nullptr;

  // Returns the library of a communicator that commSplit made. Null if it is always this one.
  const NcclApi& (*libraryOf)(ncclComm_t child) = nullptr;

  // Adds `times` to a counter that the ranks of this host share and poll, and returns the sum.
  // Callable from any thread at any time, also after a failure.
  uint64_t (*ring)(ncclComm_t comm, uint64_t times) = nullptr;

  // Sets `view` to the memory of `peer` in a window. Callable from any thread.
  ncclResult_t (*windowView)(ncclComm_t comm, ncclWindow_t window, int peer, WindowView& view) =
      nullptr;
};

}  // namespace torchcomms_pg
