// NCCL's C API as a table of function pointers, which a Library calls.
#pragma once

#include "nccl/NewerNccl.hpp"

namespace torchcomms_pg {

// X(field, function): functions of every NCCL since 2.18. A libnccl that lacks any is refused.
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

// Table of NCCL's functions. The compiler checks every entry against nccl.h.
struct NcclApi {
#define TORCHCOMMS_PG_FIELD(field, function) decltype(&::function) field = nullptr;
  TORCHCOMMS_PG_NCCL_REQUIRED(TORCHCOMMS_PG_FIELD)
  TORCHCOMMS_PG_NCCL_OPTIONAL(TORCHCOMMS_PG_FIELD)
#undef TORCHCOMMS_PG_FIELD
};

}  // namespace torchcomms_pg
