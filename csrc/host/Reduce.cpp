#include "host/Reduce.hpp"

#include <cstring>

#include "host/ReduceKernels.hpp"

namespace torchcomms_pg::host {

namespace {

const ReduceKernels& kernels() {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return fast ? kAvx2Kernels : kBaselineKernels;
#else
  return kBaselineKernels;
#endif
}

}  // namespace

void reduce(
    ncclDataType_t type, ncclRedOp_t op, void* out, const void* const* in, int n, size_t count,
    double divisor) {
  if (n == 1) {
    copy(out, in[0], count * elementSize(type));
  } else if (n > 1) {
    kernels().reduce(type, op, out, in, n, count, divisor == 0 ? n : divisor);
  }
}

void scale(ncclDataType_t type, void* out, const void* in, const void* scalar, size_t count) {
  kernels().scale(type, out, in, scalar, count);
}

void copy(void* out, const void* in, size_t bytes) {
  if (bytes > 0 && out != in) {
    std::memcpy(out, in, bytes);
  }
}

}  // namespace torchcomms_pg::host
