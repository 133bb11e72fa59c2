// The driver's API, as far as torch and cuda.core use it beside the runtime's. The rest of
// what torch's libraries import refuses each call (test/emulated/stubs.py).
#include <dlfcn.h>

#include <cstddef>
#include <string>

#define EMULATED_API extern "C" __attribute__((visibility("default")))

// Functions of the emulated runtime.
extern "C" {
int emulatedHasContext(int device);
int cudaGetDevice(int* device);
int cudaGetDeviceCount(int* count);
int cudaDriverGetVersion(int* version);
}

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidDevice = 101;
constexpr int kNotFound = 500;

// A context is its device's number, from 1.
void* contextOf(int device) {
  return reinterpret_cast<void*>(static_cast<size_t>(device) + 1);
}

}  // namespace

EMULATED_API int cuInit(unsigned) {
  return kSuccess;
}

// Driver API, "Driver Entry Point Access". Gives the newest variant of a function, such as
// cuDeviceGetUuid_v2 for cuDeviceGetUuid.
EMULATED_API int cuGetProcAddress_v2(
    const char* symbol, void** function, int, unsigned long long, int* result) {
  constexpr int kSymbolNotFound = 1;
  *function = dlsym(RTLD_DEFAULT, (std::string(symbol) + "_v2").c_str());
  if (*function == nullptr) *function = dlsym(RTLD_DEFAULT, symbol);
  if (result != nullptr) *result = *function == nullptr ? kSymbolNotFound : 0;
  return *function == nullptr ? kNotFound : kSuccess;
}

EMULATED_API int cuDriverGetVersion(int* version) {
  return cudaDriverGetVersion(version);
}

EMULATED_API int cuDeviceGetCount(int* count) {
  return cudaGetDeviceCount(count);
}

EMULATED_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}

// Says that the device has none of what torch asks the driver about: multicast, fabric handles,
// GPUDirect.
EMULATED_API int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return kSuccess;
}

// Driver API, "Primary Context Management".
EMULATED_API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  if (device < 0) return kInvalidDevice;
  if (flags != nullptr) *flags = 0;
  *active = emulatedHasContext(device);
  return kSuccess;
}

// Gives null if the thread's device has no context yet (Driver API, cuCtxGetCurrent).
EMULATED_API int cuCtxGetCurrent(void** context) {
  int device = 0;
  cudaGetDevice(&device);
  *context = emulatedHasContext(device) != 0 ? contextOf(device) : nullptr;
  return kSuccess;
}

// Logs nothing.
EMULATED_API int cuLogsRegisterCallback(void*, void*, void* handle) {
  *static_cast<void**>(handle) = nullptr;
  return kSuccess;
}

EMULATED_API int cuLogsUnregisterCallback(void*) {
  return kSuccess;
}

EMULATED_API int cuGetErrorString(int, const char** text) {
  *text = "an error of the emulated driver";
  return kSuccess;
}
