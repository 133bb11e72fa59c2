#include "libcudart/Devices.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "libcudart/Calls.hpp"

namespace emulated {

namespace {

thread_local int device = 0;  // in a new thread, whatever others have set (cudaSetDevice)

std::mutex contextsMutex;
std::array<std::string, kDevices> contexts;  // who made it

// The number of devices in EMULATED_DEVICES, kDevices at most; without it kDevices.
int visibleDevices() {
  static const int visible = [] {
    const char* const text = std::getenv("EMULATED_DEVICES");
    return text == nullptr ? kDevices : std::clamp(std::atoi(text), 1, kDevices);
  }();
  return visible;
}

}  // namespace

int currentDevice() {
  return device;
}

void needContext(const char* function) {
  const std::lock_guard lock(contextsMutex);
  auto& maker = contexts[device];
  if (maker.empty()) maker = threadName() + ": " + function;
}

}  // namespace emulated

using namespace emulated;

// Returns JSON: {device: "thread: function"} of the contexts there are, and who made them.
EMULATED_API const char* emulatedContexts() {
  thread_local std::string text;
  text.clear();
  const std::lock_guard lock(contextsMutex);
  for (int i = 0; i < kDevices; ++i) {
    if (contexts[i].empty()) continue;
    text += (text.empty() ? "" : ", ") + quoted(std::to_string(i)) + ": " + quoted(contexts[i]);
  }
  text = "{" + text + "}";
  return text.c_str();
}

// Serves the driver's API.
EMULATED_API int emulatedHasContext(int of) {
  const std::lock_guard lock(contextsMutex);
  return of >= 0 && of < kDevices && !contexts[of].empty() ? 1 : 0;
}

// ---------------------------------------------------------------- Runtime API, "Device Management"

EMULATED_API cudaError_t cudaGetDeviceCount(int* count) {
  called(__func__);
  *count = visibleDevices();
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaGetDevice(int* current) {
  called(__func__);
  *current = device;
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaSetDevice(int wanted) {
  called(__func__);
  if (unloading()) return failed(cudaErrorCudartUnloading, __func__);
  if (wanted < 0 || wanted >= visibleDevices()) return failed(cudaErrorInvalidDevice, __func__);
  device = wanted;
  needContext(__func__);
  return cudaSuccess;
}

// Gives what torch and NCCL read: an H100's properties, with less of everything.
EMULATED_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int of) {
  called(__func__);
  if (of < 0 || of >= visibleDevices()) return failed(cudaErrorInvalidDevice, __func__);
  std::memset(properties, 0, sizeof *properties);
  auto& all = *properties;
  std::snprintf(all.name, sizeof all.name, "Emulated GPU");
  std::snprintf(all.uuid.bytes, sizeof all.uuid.bytes, "emulated%d", of);
  all.totalGlobalMem = kDeviceMemory;
  all.major = 9;
  all.multiProcessorCount = 4;
  all.warpSize = 32;
  all.maxThreadsPerBlock = 1024;
  all.maxThreadsPerMultiProcessor = 2048;
  all.maxBlocksPerMultiProcessor = 32;
  all.maxThreadsDim[0] = all.maxThreadsDim[1] = 1024;
  all.maxThreadsDim[2] = 64;
  all.maxGridSize[0] = 2147483647;
  all.maxGridSize[1] = all.maxGridSize[2] = 65535;
  all.regsPerBlock = all.regsPerMultiprocessor = 65536;
  all.sharedMemPerBlock = 48 << 10;
  all.sharedMemPerBlockOptin = 227 << 10;
  all.sharedMemPerMultiprocessor = 228 << 10;
  all.l2CacheSize = 1 << 20;
  all.totalConstMem = 65536;
  all.textureAlignment = 512;
  all.unifiedAddressing = 1;
  all.concurrentKernels = 1;
  all.pciBusID = 1 + of;
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int of) {
  called(__func__);
  if (of < 0 || of >= visibleDevices()) return failed(cudaErrorInvalidDevice, __func__);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    default: *value = 0; break;  // it lacks the rest
  }
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int of) {
  called(__func__);
  std::snprintf(id, length, "0000:%02x:00.0", 1 + of);
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  calledDriver(__func__);
  needContext(__func__);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

// ---------------------------------------------------------------- Runtime API, "Peer Device Memory
// Access"

EMULATED_API cudaError_t cudaDeviceCanAccessPeer(int* can, int of, int peer) {
  called(__func__);
  *can = of != peer ? 1 : 0;
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  calledDriver(__func__);
  needContext(__func__);
  return cudaSuccess;
}

// ---------------------------------------------------------------- Runtime API, "Version
// Management"

EMULATED_API cudaError_t cudaDriverGetVersion(int* version) {
  called(__func__);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaRuntimeGetVersion(int* version) {
  called(__func__);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// ---------------------------------------------------------------- Runtime API, "Profiler Control"

EMULATED_API cudaError_t cudaProfilerStart() {
  called(__func__);
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaProfilerStop() {
  called(__func__);
  return cudaSuccess;
}
