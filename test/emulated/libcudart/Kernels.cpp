// Kernels as nvcc's code registers and launches them. There is no code for the
// host in them: operators/ puts the CPU's kernels in the place of torch's, and a
// launch that gets here is refused, with the kernel's name.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "libcudart/Calls.hpp"
#include "libcudart/Emulated.hpp"

namespace emulated {

namespace {

// Names by the address of the host's stub. Pointers into torch's libraries, which stay.
struct Names {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> all;
};

Names& names() {
  static auto* const instance = new Names;
  return *instance;
}

std::string_view nameOf(const void* kernel) {
  const std::lock_guard lock(names().mutex);
  const auto found = names().all.find(kernel);
  return found == names().all.end() ? "unknown" : found->second;
}

cudaError_t launch(
    const void* kernel, cudaStream_t stream, void** arguments, const char* function) {
  calledDriver(function);
  const auto name = nameOf(kernel);
  // torch.cuda._sleep: a GPU with a clock of 1 GHz.
  if (name.find("spin_kernel") != std::string_view::npos) {
    const auto cycles = *static_cast<const int64_t*>(arguments[0]);
    return queueKernel(stream, [cycles] {
      const timespec length{cycles / 1'000'000'000, cycles % 1'000'000'000};
      nanosleep(&length, nullptr);
    });
  }
  std::fprintf(stderr, "emulated: the kernel %s is not emulated\n", name.data());
  return failed(cudaErrorNotSupported, function);
}

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared;
  cudaStream_t stream;
};

thread_local std::vector<Configuration> configurations;

}  // namespace

}  // namespace emulated

using namespace emulated;

// ---------------------------------------------------------------- what nvcc's code calls

EMULATED_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

EMULATED_API void __cudaRegisterFatBinaryEnd(void**) {}
EMULATED_API void __cudaUnregisterFatBinary(void**) {}
EMULATED_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EMULATED_API char __cudaInitModule(void**) {
  return 1;
}

EMULATED_API void __cudaRegisterFunction(
    void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(names().mutex);
  names().all[stub] = name;
}

EMULATED_API unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, static_cast<cudaStream_t>(stream)});
  return 0;
}

EMULATED_API cudaError_t
__cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

EMULATED_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

EMULATED_API cudaError_t
__cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, stream, arguments, __func__);
}

// ---------------------------------------------------------------- Runtime API, "Execution Control"

EMULATED_API cudaError_t
cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, stream, arguments, __func__);
}

EMULATED_API cudaError_t
cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  return launch(kernel, config->stream, arguments, __func__);
}

// Answers what torch asks before a launch, which is refused then.
EMULATED_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  called(__func__);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  called(__func__);
  return cudaSuccess;
}
