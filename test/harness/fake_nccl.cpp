// A libnccl for tests, which communicates nothing and writes its calls and their arguments to a
// file, a line of JSON for each call. See fake_nccl.py.
#include <dlfcn.h>
#include <nccl.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

#include "host/HostStream.hpp"

struct ncclComm {
  int rank;
  int size;
  bool suspended = false;
  std::atomic<bool> ended = false;  // aborted or revoked
};

namespace {

constexpr int kUnknown = -1;  // the size of a split communicator, since ranks do not communicate
thread_local int caller = -1;
std::atomic<bool> hanging = false;  // whether calls that wait for other ranks block
int refusal = 0;                    // the result of the calls that it refuses; 0 if it refuses none

// Appends a line to the log beside this file; each copy of the library has its own log.
void write(const std::string& line) {
  Dl_info self;
  dladdr(&refusal, &self);
  FILE* file = std::fopen((std::string(self.dli_fname) + ".log").c_str(), "a");
  std::fputs((line + "\n").c_str(), file);
  std::fclose(file);
}

std::string text(const char* value) {
  return value == nullptr ? "null" : "\"" + std::string(value) + "\"";
}

void note(const char* call, std::initializer_list<size_t> values = {}) {
  std::string all;
  for (const auto value : values) {
    all += (all.empty() ? "" : ", ") + std::to_string(value);
  }
  write("{\"call\": \"" + std::string(call) + "\", \"values\": [" + all + "]}");
}

size_t number(const void* address) {
  return reinterpret_cast<size_t>(address);
}

// Returns the result of a call that waits for other ranks. While `hanging`, blocks until another
// thread aborts or revokes the communicator.
ncclResult_t together(ncclComm_t comm) {
  if (refusal != 0) {
    return static_cast<ncclResult_t>(refusal);
  }
  if (hanging) {
    comm->ended.wait(false);
    return ncclRemoteError;
  }
  return ncclSuccess;
}

std::string json(const ncclConfig_t& config) {
  std::string all =
      "{\"netName\": " + text(config.netName) + ", \"commName\": " + text(config.commName);
#define NUMBER(field)                                           \
  if (config.field != NCCL_CONFIG_UNDEF_INT) {                  \
    all += ", \"" #field "\": " + std::to_string(config.field); \
  }
  NUMBER(blocking)
  NUMBER(cgaClusterSize)
  NUMBER(minCTAs)
  NUMBER(maxCTAs)
  NUMBER(splitShare)
  NUMBER(trafficClass)
  NUMBER(collnetEnable)
  NUMBER(CTAPolicy)
  NUMBER(shrinkShare)
  NUMBER(nvlsCTAs)
  NUMBER(nChannelsPerNetPeer)
  NUMBER(nvlinkCentricSched)
  return all + "}";
}

ncclResult_t begin(
    const char* call, ncclComm_t* place, int size, int rank, const ncclUniqueId* ids, int count,
    const ncclConfig_t& config) {
  *place = new ncclComm{rank, size};
  std::string names;
  for (int i = 0; i < count; ++i) {
    names += (i == 0 ? "" : ", ") + text(ids[i].internal);
  }
  write(
      "{\"call\": \"" + std::string(call) + "\", \"rank\": " + std::to_string(rank) +
      ", \"size\": " + std::to_string(size) + ", \"ids\": [" + names +
      "], \"comm\": " + std::to_string(number(*place)) + ", \"config\": " + json(config) + "}");
  hanging.wait(true);
  return ncclSuccess;
}

ncclResult_t divide(
    const char* call, ncclComm_t parent, ncclComm_t child, ncclComm_t* place,
    const ncclConfig_t& config) {
  *place = child;
  write(
      "{\"call\": \"" + std::string(call) + "\", \"rank\": " + std::to_string(parent->rank) +
      ", \"made\": " + (child == nullptr ? "false" : "true") + ", \"config\": " + json(config) +
      "}");
  return ncclSuccess;
}

}  // namespace

extern "C" {

// Says which rank the calling thread is; the unique ids that it makes have this number.
void fakeRank(int rank) {
  caller = rank;
}
void fakeHang(bool hang) {
  hanging = hang;
  hanging.notify_all();
}
void fakeRefuse(int result) {
  refusal = result;
}

ncclResult_t ncclGetVersion(int* version) {
  *version = VERSION;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> made{0};
  std::snprintf(id->internal, sizeof id->internal, "%d of rank %d", ++made, caller);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t) {
  return "failed";
}
const char* ncclGetLastError(ncclComm_t) {
  return refusal != 0 ? "memory manager is disabled" : "made for a test";
}

ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return begin("init", comm, size, rank, &id, 1, *config);
}

#ifdef SCALABLE
ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int size, int rank, int count, ncclUniqueId* ids, ncclConfig_t* config) {
  return begin("scalable", comm, size, rank, ids, count, *config);
}
#endif

ncclResult_t ncclCommSplit(
    ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  auto* const child = color == NCCL_SPLIT_NOCOLOR ? nullptr : new ncclComm{key, kUnknown};
  return divide("split", comm, child, made, *config);
}

#ifdef SHRINK
ncclResult_t ncclCommShrink(
    ncclComm_t comm, int*, int excluded, ncclComm_t* made, ncclConfig_t* config, int) {
  return divide("shrink", comm, new ncclComm{comm->rank, comm->size - excluded}, made, *config);
}
#endif

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
  *state = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) {
  hanging.wait(true);
  note("finalize");
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t) {
  note("destroy");
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  write("{\"call\": \"abort\", \"rank\": " + std::to_string(comm->rank) + "}");
  comm->ended = true;
  comm->ended.notify_all();
  return ncclSuccess;
}

#ifdef REVOKE
ncclResult_t ncclCommRevoke(ncclComm_t comm, int) {
  comm->ended = true;
  comm->ended.notify_all();
  return ncclSuccess;
}
#endif

#ifdef MEMORY
ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return ncclSuccess;
}
ncclResult_t ncclMemFree(void* memory) {
  note("free", {number(memory)});
  std::free(memory);
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void* memory, size_t bytes, void** handle) {
  *handle = memory;
  note("register", {number(memory), bytes});
  return static_cast<ncclResult_t>(refusal);
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void* handle) {
  note("deregister", {number(handle)});
  return ncclSuccess;
}
ncclResult_t ncclCommWindowRegister(
    ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
  *window = static_cast<ncclWindow_t>(memory);
  note("window", {number(memory), bytes, static_cast<size_t>(flags)});
  return together(comm);
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t window) {
  note("no_window", {number(window)});
  return ncclSuccess;
}
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  note("suspend", {static_cast<size_t>(flags)});
  comm->suspended = refusal == 0;
  return together(comm);
}
ncclResult_t ncclCommResume(ncclComm_t comm) {
  note("resume");
  comm->suspended = false;
  return together(comm);
}
// Headers before 2.29.7 lack the type of `stat`.
ncclResult_t fakeMemStats(ncclComm_t comm, int stat, uint64_t* value) __asm__("ncclCommMemStats");
ncclResult_t fakeMemStats(ncclComm_t comm, int stat, uint64_t* value) {
  *value = stat == 1 ? comm->suspended : 1000 + stat;
  return static_cast<ncclResult_t>(refusal);
}
#endif

#ifdef RMA
// Headers before 2.29.2 lack these functions. No peer's memory can be mapped.
#define EXPORTED(name, ...)                                                                    \
  __attribute__((visibility("default"))) ncclResult_t fake_##name(__VA_ARGS__) __asm__(#name); \
  ncclResult_t fake_##name(__VA_ARGS__)
EXPORTED(ncclSignal, int, int, int, unsigned, ncclComm_t, cudaStream_t) {
  note("signal");
  return ncclSuccess;
}
EXPORTED(ncclWaitSignal, int, void*, ncclComm_t, cudaStream_t) {
  note("wait_signal");
  return ncclSuccess;
}
EXPORTED(ncclGetPeerDevicePointer, ncclWindow_t, size_t, int, void** pointer) {
  *pointer = nullptr;
  return ncclSuccess;
}
#endif

// Gathers from one rank: copies its input.
ncclResult_t ncclAllGather(
    const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t, cudaStream_t stream) {
  const size_t bytes = type == ncclInt32 ? 4 * count : count;
  torchcomms_pg::host::HostStream::fromHandle(stream)->enqueue(
      [=] { std::memcpy(out, in, bytes); });
  return ncclSuccess;
}

// Reduces the input of one rank in place, so only notes the call.
ncclResult_t ncclAllReduce(
    const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
  note("all_reduce");
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (comm->size == kUnknown) {
    return ncclInternalError;
  }
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

// No test calls these functions, which the loader requires.
#define UNUSED(name)                                                       \
  __attribute__((visibility("default"))) int fake_##name() __asm__(#name); \
  int fake_##name() {                                                      \
    return ncclInternalError;                                              \
  }
UNUSED(ncclRedOpCreatePreMulSum)
UNUSED(ncclRedOpDestroy)
UNUSED(ncclReduceScatter)
UNUSED(ncclBroadcast)
UNUSED(ncclReduce)
UNUSED(ncclSend)
UNUSED(ncclRecv)

}  // extern "C"
