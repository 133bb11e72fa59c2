#include "libcudart/Memory.hpp"

#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>

#include "libcudart/Calls.hpp"
#include "libcudart/Captures.hpp"
#include "libcudart/Devices.hpp"
#include "libcudart/Emulated.hpp"
#include "libcudart/Streams.hpp"

namespace emulated {

namespace {

enum class Owner { runtime, other };  // who frees it

struct Range {
  size_t bytes;
  int device;
  cudaMemoryType type;
  Owner owner;
};

// Never destroyed: memory is freed until the process is gone.
struct Ranges {
  std::mutex mutex;
  std::map<const char*, Range> all;
  std::array<size_t, kDevices> used{};
};

Ranges& ranges() {
  static auto* const instance = new Ranges;
  return *instance;
}

// Returns the range that the address is in, or the end. Called with the lock held.
std::map<const char*, Range>::iterator findRange(const void* address) {
  auto& all = ranges().all;
  const auto* const place = static_cast<const char*>(address);
  auto found = all.upper_bound(place);
  if (found == all.begin()) return all.end();
  --found;
  return place < found->first + found->second.bytes ? found : all.end();
}

void add(const void* address, const Range& range) {
  ranges().all[static_cast<const char*>(address)] = range;
  if (range.type == cudaMemoryTypeDevice) ranges().used[range.device] += range.bytes;
}

void remove(std::map<const char*, Range>::iterator range) {
  const auto& [bytes, device, type, owner] = range->second;
  if (type == cudaMemoryTypeDevice) ranges().used[device] -= bytes;
  ranges().all.erase(range);
}

cudaError_t allocate(void** place, size_t size, cudaMemoryType type, const char* function) {
  constexpr size_t kPage = 4096;
  *place = nullptr;
  needContext(function);
  if (size == 0) return cudaSuccess;
  const size_t bytes = (size + kPage - 1) / kPage * kPage;
  const int device = currentDevice();
  const std::lock_guard lock(ranges().mutex);
  if (type == cudaMemoryTypeDevice && ranges().used[device] + bytes > kDeviceMemory) {
    return failed(cudaErrorMemoryAllocation, function);
  }
  // Pages are taken with the first access, so that torch's 20 MiB blocks cost what is used of them.
  void* const memory = mmap(
      nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return failed(cudaErrorMemoryAllocation, function);
  add(memory, {bytes, device, type, Owner::runtime});
  *place = memory;
  return cudaSuccess;
}

cudaError_t release(void* memory, const char* function) {
  if (memory == nullptr) return cudaSuccess;
  const std::lock_guard lock(ranges().mutex);
  const auto found = ranges().all.find(static_cast<const char*>(memory));
  if (found == ranges().all.end() || found->second.owner != Owner::runtime) {
    return failed(cudaErrorInvalidValue, function);
  }
  const size_t bytes = found->second.bytes;
  remove(found);
  munmap(memory, bytes);
  return cudaSuccess;
}

cudaError_t allocateNow(void** place, size_t size, cudaMemoryType type, const char* function) {
  calledDriver(function);
  if (const auto error = refuseUnsafe(function)) return error;
  return allocate(place, size, type, function);
}

}  // namespace

cudaMemoryType memoryType(const void* address) {
  const std::lock_guard lock(ranges().mutex);
  const auto found = findRange(address);
  return found == ranges().all.end() ? cudaMemoryTypeUnregistered : found->second.type;
}

void adoptMemory(void* memory, size_t bytes) {
  const std::lock_guard lock(ranges().mutex);
  add(memory, {bytes, currentDevice(), cudaMemoryTypeDevice, Owner::other});
}

void disownMemory(void* memory) {
  const std::lock_guard lock(ranges().mutex);
  const auto found = ranges().all.find(static_cast<const char*>(memory));
  if (found != ranges().all.end()) remove(found);
}

}  // namespace emulated

using namespace emulated;

// ---------------------------------------------------------------- Runtime API, "Memory Management"

EMULATED_API cudaError_t cudaMalloc(void** place, size_t size) {
  return allocateNow(place, size, cudaMemoryTypeDevice, __func__);
}

EMULATED_API cudaError_t cudaHostAlloc(void** place, size_t size, unsigned) {
  return allocateNow(place, size, cudaMemoryTypeHost, __func__);
}

// "may implicitly synchronize": it waits for the memory's device, as it does in practice.
EMULATED_API cudaError_t cudaFree(void* memory) {
  calledDriver(__func__);
  if (unloading()) return failed(cudaErrorCudartUnloading, __func__);
  if (const auto error = refuseUnsafe(__func__)) return error;
  if (memory == nullptr) {
    needContext(__func__);  // the usual way to make one
    return cudaSuccess;
  }
  int device = currentDevice();
  {
    const std::lock_guard lock(ranges().mutex);
    const auto found = findRange(memory);
    if (found != ranges().all.end()) device = found->second.device;
  }
  synchronizeDevice(device);
  return release(memory, __func__);
}

EMULATED_API cudaError_t cudaFreeHost(void* memory) {
  calledDriver(__func__);
  if (unloading()) return failed(cudaErrorCudartUnloading, __func__);
  if (const auto error = refuseUnsafe(__func__)) return error;
  return release(memory, __func__);
}

EMULATED_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  calledDriver(__func__);
  needContext(__func__);
  const std::lock_guard lock(ranges().mutex);
  *total = kDeviceMemory;
  *free = kDeviceMemory - ranges().used[currentDevice()];
  return cudaSuccess;
}

// ---------------------------------------------------------------- Runtime API, "Unified
// Addressing"

EMULATED_API cudaError_t
cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  calledDriver(__func__);
  needContext(__func__);
  std::memset(attributes, 0, sizeof *attributes);
  const std::lock_guard lock(ranges().mutex);
  const auto found = findRange(address);
  if (found == ranges().all.end()) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  attributes->type = found->second.type;
  attributes->device = found->second.device;
  attributes->devicePointer = const_cast<void*>(address);
  if (found->second.type == cudaMemoryTypeHost) {
    attributes->hostPointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}
