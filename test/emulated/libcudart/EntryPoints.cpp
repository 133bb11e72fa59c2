// The driver's functions as torch asks the runtime for them.
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <string>
#include <utility>

#include "libcudart/Calls.hpp"

EMULATED_API int emulatedLacks(const char* function, int error);

namespace emulated {

namespace {

constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED
constexpr size_t kRefusals = 128;

std::mutex refusalsMutex;
std::array<std::string, kRefusals> refused;  // by number
size_t refusals = 0;

// A function without arguments, as the callee sees it, which knows its number.
template <size_t number>
int refuse() {
  return emulatedLacks(refused[number].c_str(), kNotSupported);
}

template <size_t... numbers>
std::array<int (*)(), sizeof...(numbers)> refusers(std::index_sequence<numbers...>) {
  return {&refuse<numbers>...};
}

// Returns a function that names itself and fails when it is called; torch asks for many functions
// that it never calls.
void* refuserFor(const char* function) {
  static const auto all = refusers(std::make_index_sequence<kRefusals>());
  const std::lock_guard lock(refusalsMutex);
  for (size_t i = 0; i < refusals; ++i) {
    if (refused[i] == function) return reinterpret_cast<void*>(all[i]);
  }
  if (refusals == kRefusals) return nullptr;
  refused[refusals] = function;
  return reinterpret_cast<void*>(all[refusals++]);
}

}  // namespace

}  // namespace emulated

using namespace emulated;

// ---------------------------------------------------------------- Runtime API, "Driver Entry Point
// Access"

EMULATED_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol,
    void** function,
    unsigned,
    unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  called(__func__);
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (*function == nullptr) *function = refuserFor(symbol);
  if (result != nullptr) {
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
