// Copies and fills, and what they wait for (Runtime API, "API synchronization
// behavior").
#include <cstring>
#include <memory>
#include <vector>

#include "libcudart/Calls.hpp"
#include "libcudart/Captures.hpp"
#include "libcudart/Devices.hpp"
#include "libcudart/Memory.hpp"
#include "libcudart/Streams.hpp"

namespace emulated {

namespace {

bool isPageable(const void* address) {
  return memoryType(address) == cudaMemoryTypeUnregistered;
}

// "For transfers from pageable host memory to device memory ... the pageable buffer has been
// copied to the staging memory" when the call returns; "to pageable host memory, the function
// will return only once the copy has completed".
cudaError_t copyAsync(
    void* to, const void* from, size_t bytes, cudaStream_t handle, const char* function) {
  calledDriver(function);
  needContext(function);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle, function);
  const bool capturing = stream->capturing.load(std::memory_order_acquire);
  cudaError_t error;
  if (isPageable(from) && !capturing) {
    const auto* const begin = static_cast<const char*>(from);
    auto staged = std::make_shared<const std::vector<char>>(begin, begin + bytes);
    error = stream->queue([=] { std::memcpy(to, staged->data(), bytes); });
  } else {
    error = stream->queue([=] { std::memmove(to, from, bytes); });
  }
  if (error == cudaSuccess && isPageable(to) && !capturing) stream->synchronize();
  return error;
}

cudaError_t fill(void* memory, int value, size_t bytes, cudaStream_t handle, const char* function) {
  needContext(function);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle, function);
  return stream->queue([=] { std::memset(memory, value, bytes); });
}

// Calls without a stream go through the legacy one, which a capture may forbid.
cudaError_t synchronizeLegacy(cudaError_t queued) {
  if (queued == cudaSuccess) findStream(cudaStreamLegacy)->synchronize();
  return queued;
}

}  // namespace

}  // namespace emulated

using namespace emulated;

EMULATED_API cudaError_t
cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copyAsync(to, from, bytes, stream, __func__);
}

EMULATED_API cudaError_t
cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copyAsync(to, from, bytes, stream, __func__);
}

// "It is ... invalid to call synchronous APIs, such as cudaMemcpy()" while a stream
// captures ("Prohibited and Unhandled Operations").
EMULATED_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (const auto error = refuseUnsafe(__func__)) return error;
  return synchronizeLegacy(copyAsync(to, from, bytes, cudaStreamLegacy, __func__));
}

EMULATED_API cudaError_t
cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  calledDriver(__func__);
  return fill(memory, value, bytes, stream, __func__);
}

EMULATED_API cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  calledDriver(__func__);
  if (const auto error = refuseUnsafe(__func__)) return error;
  return synchronizeLegacy(fill(memory, value, bytes, cudaStreamLegacy, __func__));
}
