// Memory that peers can map, buffers and windows that are registered, and what
// a communicator takes itself (src/allocator.cc, src/register, src/dev_runtime.cc).
#include "libcudart/Emulated.hpp"
#include "libnccl/Communicator.hpp"
#include "libnccl/Groups.hpp"
#include "libnccl/Misuse.hpp"
#include "libnccl/Version.hpp"

#define EMULATED_API extern "C" __attribute__((visibility("default")))

using namespace emulated;

EMULATED_API ncclResult_t ncclMemAlloc(void** place, size_t size) {
  if (!hasFunction(__func__, 21903)) return ncclInvalidUsage;
  const auto result = told(shm().memAlloc(place, size));
  if (result == ncclSuccess && *place != nullptr) adoptMemory(*place, size);
  return result;
}

EMULATED_API ncclResult_t ncclMemFree(void* memory) {
  if (!hasFunction(__func__, 21903)) return ncclInvalidUsage;
  if (memory != nullptr) disownMemory(memory);
  return told(shm().memFree(memory));
}

// Local.
EMULATED_API ncclResult_t
ncclCommRegister(const ncclComm_t comm, void* buffer, size_t size, void** handle) {
  if (!hasFunction(__func__, 21903)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  return told(shm().commRegister(comm->shm, buffer, size, handle));
}

EMULATED_API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  if (!hasFunction(__func__, 21903)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  return told(shm().commDeregister(comm->shm, handle));
}

// Collective, so it is a group's (src/dev_runtime.cc: a task of the communicator).
EMULATED_API ncclResult_t ncclCommWindowRegister(
    ncclComm_t comm, void* buffer, size_t size, ncclWindow_t* window, int flags) {
  if (!hasFunction(__func__, 22703)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  if (const auto error = ensureReady(*comm, __func__)) return refused(*comm, error, "");
  return submit({comm, /*setup=*/true, [=] {
                   return shm().commWindowRegister(comm->shm, buffer, size, window, flags);
                 }});
}

EMULATED_API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (!hasFunction(__func__, 22703)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  return told(shm().commWindowDeregister(comm->shm, window));
}

EMULATED_API ncclResult_t
ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** pointer) {
  if (!hasFunction(__func__, 22902)) return ncclInvalidUsage;
  return told(shm().getPeerDevicePointer(window, offset, peer, pointer));
}

// Changes the state alone: there is no memory to give back.
EMULATED_API ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  if (!hasFunction(__func__, 22907)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  if (const auto error = ensureReady(*comm, __func__)) return refused(*comm, error, "");
  if (flags != NCCL_SUSPEND_MEM || comm->suspended.exchange(true)) return ncclInvalidUsage;
  return ncclSuccess;
}

EMULATED_API ncclResult_t ncclCommResume(ncclComm_t comm) {
  if (!hasFunction(__func__, 22907)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  return comm->suspended.exchange(false) ? ncclSuccess : ncclInvalidUsage;
}

EMULATED_API ncclResult_t
ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t statistic, uint64_t* value) {
  if (!hasFunction(__func__, 22907)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  constexpr uint64_t kSuspend = 6 << 20;  // figures alone: nothing is given back
  constexpr uint64_t kPersist = 2 << 20;
  switch (statistic) {
    case ncclStatGpuMemSuspend: *value = kSuspend; return ncclSuccess;
    case ncclStatGpuMemSuspended: *value = comm->suspended ? 1 : 0; return ncclSuccess;
    case ncclStatGpuMemPersist: *value = kPersist; return ncclSuccess;
    case ncclStatGpuMemTotal: *value = kSuspend + kPersist; return ncclSuccess;
    default: return ncclInvalidArgument;
  }
}
