// The driver's functions as torch asks the runtime for them.
#include <dlfcn.h>

#include "libcudart/Calls.hpp"

using namespace emulated;

// ---------------------------------------------------------------- Runtime API, "Driver Entry Point
// Access"

EMULATED_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  called(__func__);
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (result != nullptr) {
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
