#include "nccl/Capture.hpp"

#include <dlfcn.h>

#include <atomic>

namespace torchcomms_pg {

bool isCudaCapturing(cudaStream_t stream) {
  // As in CUDA's runtime API: cudaSuccess and cudaStreamCaptureStatusNone are 0.
  using Ask = int (*)(cudaStream_t, int* status);
  // Not kept while it is missing: torch loads the runtime with its first use of a GPU.
  static std::atomic<Ask> known = nullptr;
  auto ask = known.load(std::memory_order_relaxed);
  if (ask == nullptr) {
#ifdef TORCHCOMMS_PG_ROCM
    constexpr const char* kName = "hipStreamIsCapturing";
#else
    constexpr const char* kName = "cudaStreamIsCapturing";
#endif
    ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, kName));
    known.store(ask, std::memory_order_relaxed);
  }
  int status = 0;
  return ask != nullptr && ask(stream, &status) == 0 && status != 0;
}

}  // namespace torchcomms_pg
