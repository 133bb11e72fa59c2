#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "host/ReduceKernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

// The pragma applies to every function below. It follows the headers, so that none of their
// functions is compiled for AVX2. FMA is left out: the bits of a contracted product would differ
// from the baseline's.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

namespace torchcomms_pg::host {
namespace {
#include "host/SmallFloat.inl"

void widen(float* out, const Float16* in, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  for (; i < count; ++i) {
    out[i] = Float16::widen(in[i]);
  }
}

void narrow(Float16* out, const float* in, size_t count) {
  constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), kNearestEven);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  for (; i < count; ++i) {
    out[i] = Float16::narrow(in[i]);
  }
}

#include "host/ReduceKernels.inl"
}  // namespace

const ReduceKernels kAvx2Kernels{reduceAny, scaleAny};

}  // namespace torchcomms_pg::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace torchcomms_pg::host {
const ReduceKernels kAvx2Kernels{};
}  // namespace torchcomms_pg::host

#endif
