// nccl.h, and declarations from newer versions that it may lack.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>

#if !defined(NCCL_VERSION_CODE) || NCCL_VERSION_CODE < NCCL_VERSION(2, 28, 7)
#error \
    "torchcomms_pg needs nccl.h of NCCL 2.28.7 or later to build (an older libnccl still works at run time)"
#endif

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 2)
struct ncclWaitSignalDesc_t {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
};
extern "C" {
ncclResult_t ncclPutSignal(
    const void* data, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
    size_t offset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream);
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

// Sets `pointer` to null if loads and stores cannot reach the peer. Declared in nccl_device.h since
// 2.29.2, which needs the CUDA headers.
extern "C" ncclResult_t ncclGetPeerDevicePointer(
    ncclWindow_t window, size_t offset, int peer, void** pointer);
