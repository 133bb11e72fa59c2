// The seam: NCCL's C API as a table of function pointers.
//
// Everything above this table communicates through it and does not know what filled it in: libnccl,
// the shared-memory library (shm/api/Api.hpp), or a test that wraps either to inject errors and
// delays. The compiler checks every entry against nccl.h. A null entry means "this library lacks
// it".
#pragma once

#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#if !defined(NCCL_VERSION_CODE) || NCCL_VERSION_CODE < NCCL_VERSION(2, 28, 7)
#error \
    "torchcomms_pg needs nccl.h of NCCL 2.28.7 or later to build (an older libnccl still works at run time)"
#endif

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 2)
// Declares what a newer libnccl has: it is in the table whatever header it was built with.
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

// Declared by nccl_device.h, since 2.29.2, which takes the CUDA headers to include. A null pointer:
// loads and stores do not reach the peer.
extern "C" ncclResult_t ncclGetPeerDevicePointer(
    ncclWindow_t window, size_t offset, int peer, void** pointer);

namespace torchcomms_pg {

// X(field, function): in every NCCL since 2.18; a library without one of them
// is refused.
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

// X(field, function): came later; null where the loaded library lacks it.
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
  int peer = 0;  // for recvTagged, kAnyPeer takes whoever sends first
  int tag = 0;
  // True for a send that ends when the message has been received, not when the buffer may be used
  // again. More than a few hundred that are not received end as others do.
  bool confirmed = false;
  // Called once if the call returns ncclSuccess, and never if it returns an error: from the call
  // itself or from a thread of the library, when the message has been delivered or has failed.
  // Null: the call orders the message on its stream.
  void (*done)(void* context, ncclResult_t result, int peer) noexcept = nullptr;
  void* context = nullptr;
};

inline constexpr int kAnyPeer = -1;

// Value of sigIdx with which putSignal puts without a signal; beyond NCCL.
inline constexpr int kNoSignal = -1;

// The memory that one rank has registered with a window, mapped here.
struct WindowView {
  std::shared_ptr<std::byte> memory;  // keeps the mapping, whatever becomes of the window
  size_t bytes = 0;
};

struct NcclApi {
#define TORCHCOMMS_PG_FIELD(field, function) decltype(&::function) field = nullptr;
  TORCHCOMMS_PG_NCCL_REQUIRED(TORCHCOMMS_PG_FIELD)
  TORCHCOMMS_PG_NCCL_OPTIONAL(TORCHCOMMS_PG_FIELD)
#undef TORCHCOMMS_PG_FIELD

  // Limit of sigIdx, exclusive. NCCL promises 0 alone.
  int signals = 1;

  // Functions beyond NCCL, for libraries in host memory; libnccl cannot do this. Null in a table
  // filled from libnccl.

  // Blocks the stream until all ranks have come.
  ncclResult_t (*barrier)(ncclComm_t comm, cudaStream_t stream) = nullptr;

  // Sends or receives point-to-point with a tag. Messages of one pair and tag are matched in issue
  // order; different tags and different peers do not wait for each other. With `done` the message
  // is independent of every stream, and not for groups.
  ncclResult_t (*sendTagged)(const Message& message, ncclComm_t comm, cudaStream_t stream) =
      nullptr;
  ncclResult_t (*recvTagged)(const Message& message, ncclComm_t comm, cudaStream_t stream) =
      nullptr;

  // Returns the ranks that the oldest unfinished operation of `comm` still waits for (during
  // initialization: those that have not joined), ascending; after a failure the ranks at fault,
  // where known. Callable from any thread at any time.
  std::vector<int> (*absentRanks)(ncclComm_t comm) = nullptr;
  // Tells whether these ranks certainly have not come. False: they may have, and wait for others
  // themselves, or what they have sent is lost on a connection that is cut.
  bool absenceIsCertain = true;

  // Returns whether the operation issued last has given the other ranks what they need of this one,
  // so that they do not wait for the stream to come to it. For the thread that has issued it.
  bool (*published)(ncclComm_t comm) = nullptr;

  // Declares the communicator failed on every rank, by the fault of `ranks`
  // (may be empty): blocked and later calls return `result`, and getLastError
  // gives `reason`. Callable from any thread at any time; the first failure of
  // a communicator wins.
  ncclResult_t (*fail)(
      ncclComm_t comm,
      ncclResult_t result,
      const std::string& reason,
      const std::vector<int>& ranks) = nullptr;

  // Does the same as ncclCommShrink, but returns ncclInProgress and makes none where this rank
  // would wait past `deadline` for others that stay.
  ncclResult_t (*shrinkUntil)(
      ncclComm_t comm,
      int* excluded,
      int excludedCount,
      ncclComm_t* made,
      ncclConfig_t* config,
      int flags,
      std::chrono::steady_clock::time_point deadline) = nullptr;

  // Looks for what ranks of other hosts have to tell a rank that waits for nothing: a failure,
  // which commGetAsyncError tells then, or that it is needed to connect the ranks.
  struct Probe {
    // Returns whether there is something new, for which the ranks that hear this one's ring() have
    // to look as well. `thorough`: looks for all of it, also where nothing seems to be new. May
    // block; is for one thread; may outlive the communicator.
    std::function<bool(bool thorough)> look;
    // Turn of this rank: those that hear each other ring take turns in looking, each for a second.
    int turn = 0;
    int turns = 1;
  };
  // Returns the look; null: the library needs none.
  Probe (*probe)(ncclComm_t comm) = nullptr;

  // Returns the library whose functions a communicator that commSplit made takes; null: this one's.
  const NcclApi& (*libraryOf)(ncclComm_t child) = nullptr;

  // Adds to a counter that all ranks see, to get the attention of the others, and returns it.
  // Callable from any thread at any time, also after a failure.
  uint64_t (*ring)(ncclComm_t comm, uint64_t times) = nullptr;

  // Gives the memory of `peer` in a window. Callable from any thread.
  ncclResult_t (*windowView)(ncclComm_t comm, ncclWindow_t window, int peer, WindowView& view) =
      nullptr;
};

}  // namespace torchcomms_pg
