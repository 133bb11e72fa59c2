// Communicators: how they come up, are asked, and end (src/init.cc).
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "libcudart/Emulated.hpp"
#include "libnccl/Communicator.hpp"
#include "libnccl/Groups.hpp"
#include "libnccl/Misuse.hpp"
#include "libnccl/Version.hpp"

#define EMULATED_API extern "C" __attribute__((visibility("default")))

namespace emulated {

namespace {

constexpr std::chrono::microseconds kPoll{100};

// parseCommConfig: what a caller's older or newer header has beyond `blocking` does not matter
// here.
ncclResult_t readConfig(const ncclConfig_t* config, bool inherited, bool& blocking) {
  blocking = inherited;
  if (config == nullptr) return ncclSuccess;
  if (config->magic != ncclConfig_t(NCCL_CONFIG_INITIALIZER).magic) {
    setError("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    return ncclInvalidArgument;
  }
  if (config->blocking == NCCL_CONFIG_UNDEF_INT) return ncclSuccess;
  if (config->blocking != 0 && config->blocking != 1) {
    setError("Invalid config blocking attribute value " + std::to_string(config->blocking));
    return ncclInvalidArgument;
  }
  blocking = config->blocking == 1;
  return ncclSuccess;
}

// csrc/shm's communicators do not block, so that every wait for other ranks is here, where an abort
// ends it (NCCL's bootstrap and transports look at the abort flag while they wait).
ncclConfig_t nonBlocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

ncclResult_t awaitPeers(Comm& comm) {
  auto state = ncclInProgress;
  while (state == ncclInProgress) {
    if (comm.aborted) return ncclInternalError;
    const auto asked = shm().commGetAsyncError(comm.shm, &state);
    if (asked != ncclSuccess) return asked;
    if (state == ncclInProgress) std::this_thread::sleep_for(kPoll);
  }
  return state;
}

// A graph that holds an operation keeps the communicator's resources: commDestroySync waits
// `while (comm->localPersistentRefs != 0)`, for a finalize, a destroy and an abort alike.
void awaitGraphs(Comm& comm) {
  for (int left = comm.persistent; left != 0; left = comm.persistent) comm.persistent.wait(left);
}

// ncclGroupEnd and what goes through it set the device again that they found (src/group.cc,
// savedDev), which makes a context there (Runtime API, cudaSetDevice).
void restoreDevice() {
  cudaSetDevice(currentDevice());
}

// commFree: a call that captures of other threads forbid.
void freeHostMemory() {
  cudaFreeHost(nullptr);
}

ncclResult_t init(
    ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config,
    const char* function) {
  bool blocking = true;
  if (made == nullptr || ranks < 1 || rank < 0 || rank >= ranks) {
    setError(
        std::string(function) + " : invalid rank " + std::to_string(rank) + " of " +
        std::to_string(ranks));
    failGroup(ncclInvalidArgument);
    return ncclInvalidArgument;
  }
  if (const auto error = readConfig(config, true, blocking)) {
    failGroup(error);
    return error;
  }
  // "*newcomm = comm" before the group ends: another thread can abort what waits for its peers.
  auto* const comm = publish(std::make_unique<Comm>(rank, ranks, currentDevice(), blocking));
  std::atomic_ref(*made).store(comm);
  return submit({comm, /*setup=*/true, [comm, ranks, id, rank] {
                   // "Make sure the CUDA runtime is initialized."
                   if (cudaFree(nullptr) != cudaSuccess) return ncclUnhandledCudaError;
                   auto quiet = nonBlocking();
                   ncclComm_t joined = nullptr;
                   const auto begun = shm().commInitRankConfig(&joined, ranks, id, rank, &quiet);
                   if (begun != ncclSuccess && begun != ncclInProgress) return begun;
                   comm->shm.store(joined);
                   const auto result = awaitPeers(*comm);
                   if (result != ncclSuccess && !comm->aborted) {
                     shm().commAbort(comm->shm.exchange(nullptr));
                   }
                   return result;
                 }});
}

// Makes the result of a split or shrink of `parent`: written by the background, late.
template <class Divide>
ncclResult_t divide(
    Comm& parent, ncclComm_t* made, const ncclConfig_t* config, const char* function,
    Divide&& begin) {
  bool blocking = parent.blocking;
  if (const auto error = readConfig(config, blocking, blocking)) {
    failGroup(error);
    return refused(parent, error, "");
  }
  if (made == nullptr) return refused(parent, ncclInvalidArgument, function);
  *made = nullptr;
  return submit({&parent, /*setup=*/true, [=, &parent] {
                   auto quiet = nonBlocking();
                   ncclComm_t divided = nullptr;
                   const auto begun = begin(parent.shm.load(), &divided, &quiet);
                   if (begun != ncclSuccess && begun != ncclInProgress) return begun;
                   if (divided == nullptr) return ncclSuccess;  // without a color
                   int rank = 0;
                   int size = 0;
                   shm().commUserRank(divided, &rank);
                   shm().commCount(divided, &size);
                   auto child = std::make_unique<Comm>(rank, size, parent.device, blocking);
                   child->shm.store(divided);
                   const auto result = awaitPeers(*child);
                   child->state.store(result);
                   std::atomic_ref(*made).store(publish(std::move(child)));
                   return result;
                 }});
}

}  // namespace

}  // namespace emulated

using namespace emulated;

EMULATED_API ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = ncclVersion();
  return ncclSuccess;
}

EMULATED_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return told(shm().getUniqueId(id));
}

EMULATED_API const char* ncclGetErrorString(ncclResult_t result) {
  return shm().getErrorString(result);
}

EMULATED_API const char* ncclGetLastError(ncclComm_t) {
  return lastErrorText();
}

EMULATED_API ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return init(made, ranks, id, rank, config, __func__);
}

EMULATED_API ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return init(made, ranks, id, rank, nullptr, __func__);
}

// More ids spread the bootstrap over several roots; one does here.
EMULATED_API ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* made, int ranks, int rank, int count, ncclUniqueId* ids, ncclConfig_t* config) {
  if (!hasFunction(__func__, 22304)) return ncclInvalidUsage;
  if (count < 1 || count > ranks || ids == nullptr) return ncclInvalidArgument;
  return init(made, ranks, ids[0], rank, config, __func__);
}

EMULATED_API ncclResult_t
ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  if (const auto error = ensureReady(*comm, __func__)) return error;
  return divide(*comm, made, config, __func__, [=](auto parent, auto* child, auto* quiet) {
    return shm().commSplit(parent, color, key, child, quiet);
  });
}

EMULATED_API ncclResult_t ncclCommShrink(
    ncclComm_t comm, int* excluded, int count, ncclComm_t* made, ncclConfig_t* config, int flags) {
  if (!hasFunction(__func__, 22703)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  // An aborting shrink ends what is in progress; the other must find nothing.
  if ((flags & NCCL_SHRINK_ABORT) == 0) {
    if (const auto error = ensureReady(*comm, __func__)) return error;
  }
  if (excluded == nullptr || count < 1) return refused(*comm, ncclInvalidArgument, __func__);
  const std::vector<int> gone(excluded, excluded + count);
  return divide(*comm, made, config, __func__, [=](auto parent, auto* child, auto* quiet) {
    auto ranks = gone;
    return shm().commShrink(parent, ranks.data(), count, child, quiet, flags);
  });
}

EMULATED_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (const auto error = check(comm, __func__)) return error;
  if (state == nullptr) return ncclInvalidArgument;
  // Reads only an atomic without background jobs, also while another thread is in a call.
  if (comm->blocking || !asyncErrorCompletesJobs()) {
    *state = asyncError(*comm);
    return ncclSuccess;
  }
  const Inside inside(*comm, __func__);
  *state = asyncError(*comm);
  return ncclSuccess;
}

EMULATED_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  if (const auto error = ensureReady(*comm, __func__)) return refused(*comm, error, "");
  if (comm->revoked || comm->finalized.exchange(true)) {
    return refused(*comm, ncclInvalidArgument, "ncclCommFinalize : finalized or revoked before");
  }
  return submit({comm, /*setup=*/true, [comm] {
                   gates().finalize.pass();
                   awaitGraphs(*comm);
                   return shm().commFinalize(comm->shm);
                 }});
}

EMULATED_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  if (const auto error = ensureReady(*comm, __func__)) {
    if (!destroyLeavesGroupOpen()) {
      misuse(__func__, "refused: the communicator is not destroyed");
      return error;
    }
    groupStart();
    misuse(__func__, "refused: the communicator is not destroyed, and the thread's group is open");
    return error;
  }
  if (!comm->finalized.exchange(true)) awaitGraphs(*comm);
  const auto result = shm().commDestroy(comm->shm);
  end(*comm);
  freeHostMemory();
  restoreDevice();
  return result;
}

// Called from any thread. "ncclCommEnsureReady" joins the background; a call that waits for peers
// returns ncclInternalError, and a kernel ends, since they look at the abort flag.
EMULATED_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  if (const auto error = check(comm, __func__)) return error;
  if (comm->aborted.exchange(true)) return ncclInvalidArgument;
  end(*comm);
  // An init is not ended by csrc/shm's abort before it has joined there; awaitPeers sees the flag.
  const auto leftBehind = comm->shm.load();
  auto result = leftBehind == nullptr ? ncclSuccess : shm().commAbort(leftBehind);
  completeJob(*comm);
  const auto mine = std::this_thread::get_id();
  for (bool others = true; others; std::this_thread::sleep_for(kPoll)) {
    const std::lock_guard lock(comm->mutex);
    others = std::ranges::any_of(comm->inside, [&](auto& entry) { return entry.first != mine; });
  }
  if (const auto joinedLate = comm->shm.load(); joinedLate != leftBehind) {
    result = shm().commAbort(joinedLate);
  }
  // Revoke has set finalizeCalled, so that commReclaim leaves out commDestroySync, which waits.
  if (comm->revoked) {
    comm->freed.store(true);
  } else {
    awaitGraphs(*comm);
  }
  freeHostMemory();
  restoreDevice();
  return result;
}

// "ncclGroupJobAbort(comm->groupJob)" frees the job and leaves the pointer.
EMULATED_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (!hasFunction(__func__, 22807)) return ncclInvalidUsage;
  if (const auto error = check(comm, __func__)) return error;
  const Inside inside(*comm, __func__);
  if (flags != NCCL_REVOKE_DEFAULT || comm->finalized || comm->revoked.exchange(true)) {
    return refused(*comm, ncclInvalidArgument, "ncclCommRevoke : finalized or revoked before");
  }
  bool hadJob = false;
  {
    const std::lock_guard lock(comm->mutex);
    hadJob = comm->job != nullptr;
  }
  restoreDevice();
  auto* const joined = comm->shm.load();
  const auto result = shm().commRevoke(joined, flags);
  completeJob(*comm);
  comm->state.store(result);
  ++counts().revoked;
  const std::lock_guard lock(comm->mutex);
  comm->jobDangles = hadJob;
  return result;
}

EMULATED_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (const auto error = check(comm, __func__)) return error;
  *count = comm->size;
  return ncclSuccess;
}

EMULATED_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  if (const auto error = check(comm, __func__)) return error;
  *device = comm->device;
  return ncclSuccess;
}

EMULATED_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  if (const auto error = check(comm, __func__)) return error;
  *rank = comm->rank;
  return ncclSuccess;
}

EMULATED_API ncclResult_t ncclGroupStart() {
  groupStart();
  return ncclSuccess;
}

EMULATED_API ncclResult_t ncclGroupEnd() {
  return groupEnd();
}
