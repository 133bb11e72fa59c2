#include "base/Capture.hpp"

#include <dlfcn.h>

#include <atomic>

namespace torchcomms_pg {

namespace {

#ifdef TORCHCOMMS_PG_ROCM
#define TORCHCOMMS_PG_RUNTIME(name) "hip" name
#else
#define TORCHCOMMS_PG_RUNTIME(name) "cuda" name
#endif

// Returns a function of the runtime, looked up once. Returns null, and looks again at the next
// call, until torch's first use of a GPU has loaded the runtime.
template <class Function>
Function runtime(std::atomic<Function>& known, const char* name) {
  auto function = known.load(std::memory_order_relaxed);
  if (function == nullptr) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    known.store(function, std::memory_order_relaxed);
  }
  return function;
}

}  // namespace

// In the functions below, 0 is cudaSuccess and cudaStreamCaptureStatusNone.

bool isCudaCapturing(cudaStream_t stream) {
  using Ask = int (*)(cudaStream_t, int* status);
  static std::atomic<Ask> known = nullptr;
  const auto ask = runtime(known, TORCHCOMMS_PG_RUNTIME("StreamIsCapturing"));
  int status = 0;
  return ask != nullptr && ask(stream, &status) == 0 && status != 0;
}

void useThreadLocalCaptureMode() {
  constexpr int kThreadLocal = 1;  // cudaStreamCaptureModeThreadLocal
  using Exchange = int (*)(int* mode);
  static std::atomic<Exchange> known = nullptr;
  if (const auto exchange =
          runtime(known, TORCHCOMMS_PG_RUNTIME("ThreadExchangeStreamCaptureMode"))) {
    int mode = kThreadLocal;
    exchange(&mode);
  }
}

}  // namespace torchcomms_pg
