#include "shm/api/Management.hpp"

#include <exception>

#include "base/NeverDestroyed.hpp"
#include "shm/api/Api.hpp"
#include "shm/api/GroupCalls.hpp"
#include "shm/api/Lifecycle.hpp"
#include "shm/api/ResultCodes.hpp"
#include "shm/api/Validate.hpp"
#include "shm/segment/MappableMemory.hpp"

namespace torchcomms_pg::shm {
namespace {

ncclResult_t getVersion(int* version) {
  return guarded([&] {
    checkPointer("getVersion", "version", version);
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
  });
}

ncclResult_t getUniqueId(ncclUniqueId* id) {
  return guarded([&] {
    checkPointer("getUniqueId", "uniqueId", id);
    *id = makeUniqueId();
    return ncclSuccess;
  });
}

const char* getErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {
      "no error",
      "unhandled accelerator error",
      "system error",
      "internal error",
      "invalid argument",
      "invalid usage",
      "remote process exited, left or failed",
      "operation in progress",
      "timed out"};
  const auto index = static_cast<size_t>(result);
  return index < std::size(kTexts) ? kTexts[index] : "unknown result code";
}

const char* getLastError(ncclComm_t handle) {
  if (handle != nullptr) {
    try {
      const std::shared_ptr<Comm> comm = findHandle(handle, "getLastError");
      if (comm->segment().failed()) setThreadError(comm->segment().failure().what());
    } catch (const std::exception&) {
      // If the communicator has ended or memory is short, returns this thread's own last error.
    }
  }
  return threadError().c_str();
}

ncclResult_t commInitRankConfig(
    ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return guarded([&] { return initRank(made, ranks, id, rank, config); });
}

// Removes the handle of a communicator in a forked child and frees nothing: the memory belongs to
// the parent's rank, and threads that do not exist in the child may hold the locks. Returns false,
// and does nothing, if this process has joined the communicator itself.
bool forgetInFork(ncclComm_t handle, const std::shared_ptr<Comm>& comm) {
  try {
    comm->checkProcess();
    return false;
  } catch (const NcclError&) {
    neverDestroyed<std::shared_ptr<Comm>>(comm);
    removeHandle(handle);
    return true;
  }
}

ncclResult_t commFinalize(ncclComm_t handle) {
  return withComm(handle, "commFinalize", [&](const std::shared_ptr<Comm>& comm) {
    comm->checkProcess();
    comm->finalize();
    return ncclSuccess;
  });
}

ncclResult_t commDestroy(ncclComm_t handle) {
  return withComm(handle, "commDestroy", [&](const std::shared_ptr<Comm>& comm) {
    if (forgetInFork(handle, comm)) return ncclSuccess;
    comm->destroy();
    removeHandle(handle);
    return ncclSuccess;
  });
}

ncclResult_t commAbort(ncclComm_t handle) {
  return withComm(handle, "commAbort", [&](const std::shared_ptr<Comm>& comm) {
    if (forgetInFork(handle, comm)) return ncclSuccess;
    comm->abort();
    removeHandle(handle);
    return ncclSuccess;
  });
}

ncclResult_t commRevoke(ncclComm_t handle, int flags) {
  return withComm(handle, "commRevoke", [&](const std::shared_ptr<Comm>& comm) {
    comm->checkProcess();
    if (flags != NCCL_REVOKE_DEFAULT) {
      invalidArgument(
          "commRevoke", "revokeFlags is " + std::to_string(flags) + ", wanted NCCL_REVOKE_DEFAULT");
    }
    comm->revoke();
    return ncclSuccess;
  });
}

ncclResult_t commSplit(
    ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  return withComm(handle, "commSplit", [&](const std::shared_ptr<Comm>& comm) {
    return split(comm, color, key, made, config);
  });
}

ncclResult_t commShrink(
    ncclComm_t handle, int* excluded, int excludedCount, ncclComm_t* made, ncclConfig_t* config,
    int flags) {
  return withComm(handle, "commShrink", [&](const std::shared_ptr<Comm>& comm) {
    if (excludedCount < 1 || excludedCount >= comm->size()) {
      invalidArgument(
          "commShrink", "excludeRanksCount is " + std::to_string(excludedCount) + ", wanted 1 to " +
                            std::to_string(comm->size() - 1));
    }
    checkPointer("commShrink", "excludeRanksList", excluded);
    constexpr auto kNever = std::chrono::steady_clock::time_point::max();
    const std::span gone(excluded, static_cast<size_t>(excludedCount));
    return library().shrink(handle, gone, made, config, flags, kNever);
  });
}

ncclResult_t commGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  return withComm(handle, "commGetAsyncError", [&](const std::shared_ptr<Comm>& comm) {
    checkPointer("commGetAsyncError", "asyncError", error);
    *error = comm->asyncError();
    return ncclSuccess;
  });
}

ncclResult_t commCount(const ncclComm_t handle, int* count) {
  return withComm(handle, "commCount", [&](const std::shared_ptr<Comm>& comm) {
    checkPointer("commCount", "count", count);
    *count = comm->size();
    return ncclSuccess;
  });
}

ncclResult_t commUserRank(const ncclComm_t handle, int* rank) {
  return withComm(handle, "commUserRank", [&](const std::shared_ptr<Comm>& comm) {
    checkPointer("commUserRank", "rank", rank);
    *rank = comm->rank();
    return ncclSuccess;
  });
}

ncclResult_t redOpCreatePreMulSum(
    ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
    ncclComm_t handle) {
  constexpr const char* kName = "redOpCreatePreMulSum";
  return withComm(handle, kName, [&](const std::shared_ptr<Comm>& comm) {
    comm->checkProcess();
    checkPointer(kName, "op", op);
    checkPointer(kName, "scalar", scalar);
    checkType(kName, type);
    if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate) {
      invalidArgument(
          kName, "residence is " + std::to_string(residence) +
                     ", wanted ncclScalarDevice or ncclScalarHostImmediate");
    }
    *op = comm->operators().createPreMulSum(scalar, type, residence);
    return ncclSuccess;
  });
}

ncclResult_t redOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  return withComm(handle, "redOpDestroy", [&](const std::shared_ptr<Comm>& comm) {
    comm->checkProcess();
    comm->operators().destroy(op);
    return ncclSuccess;
  });
}

ncclResult_t memAlloc(void** pointer, size_t size) {
  return guarded([&] {
    checkPointer("memAlloc", "ptr", pointer);
    *pointer = nullptr;
    if (size != 0) *pointer = allocateMemory(size);
    return ncclSuccess;
  });
}

ncclResult_t memFree(void* pointer) {
  return guarded([&] {
    if (pointer != nullptr) freeMemory(pointer);
    return ncclSuccess;
  });
}

ncclResult_t commRegister(const ncclComm_t handle, void* buffer, size_t size, void** registration) {
  return withComm(handle, "commRegister", [&](const std::shared_ptr<Comm>& comm) {
    comm->checkProcess();
    checkPointer("commRegister", "handle", registration);
    checkBuffer("commRegister", "buff", buffer, size);
    *registration = comm->registerBuffer();
    return ncclSuccess;
  });
}

ncclResult_t commDeregister(const ncclComm_t handle, void* registration) {
  return withComm(handle, "commDeregister", [&](const std::shared_ptr<Comm>& comm) {
    comm->checkProcess();
    comm->deregisterBuffer(registration);
    return ncclSuccess;
  });
}

}  // namespace

void addManagement(NcclApi& table) {
  table.getVersion = getVersion;
  table.getUniqueId = getUniqueId;
  table.getErrorString = getErrorString;
  table.getLastError = getLastError;
  table.commInitRankConfig = commInitRankConfig;
  table.commFinalize = commFinalize;
  table.commDestroy = commDestroy;
  table.commAbort = commAbort;
  table.commSplit = commSplit;
  table.commGetAsyncError = commGetAsyncError;
  table.commCount = commCount;
  table.commUserRank = commUserRank;
  table.redOpCreatePreMulSum = redOpCreatePreMulSum;
  table.redOpDestroy = redOpDestroy;
  table.memAlloc = memAlloc;
  table.memFree = memFree;
  table.commRegister = commRegister;
  table.commDeregister = commDeregister;
  table.commShrink = commShrink;
  table.commRevoke = commRevoke;
}

}  // namespace torchcomms_pg::shm
