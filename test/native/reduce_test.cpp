// The arithmetic against a slow reference that shares no code with it.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>

#include "Check.hpp"
#include "Values.hpp"
#include "host/ReduceKernels.hpp"

using namespace test;
using namespace torchcomms_pg::host;
using torchcomms_pg::elementSize;

namespace {

using Bytes = std::vector<unsigned char>;

template <class T>
T combined(ncclRedOp_t reduction, T a, T b) {
  switch (reduction) {
    case ncclProd:
      if constexpr (std::is_integral_v<T>) return static_cast<T>(uint64_t(a) * uint64_t(b));
      return a * b;
    case ncclMax: return a > b || a != a ? a : b;
    case ncclMin: return a < b || a != a ? a : b;
    default:
      if constexpr (std::is_integral_v<T>) return static_cast<T>(uint64_t(a) + uint64_t(b));
      return a + b;
  }
}

template <class T>
T element(const void* memory, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(memory) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void putElement(void* memory, size_t i, T value) {
  std::memcpy(static_cast<char*>(memory) + i * sizeof(T), &value, sizeof(T));
}

template <class T>
void expectWide(ncclRedOp_t reduction, const std::vector<Bytes>& in, double divisor, Bytes& out) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    T value = element<T>(in[0].data(), i);
    for (size_t r = 1; r < in.size(); ++r) {
      value = combined(reduction, value, element<T>(in[r].data(), i));
    }
    if (reduction == ncclAvg) {
      if constexpr (std::is_floating_point_v<T>) {
        value /= static_cast<T>(divisor);
      } else if constexpr (std::is_signed_v<T>) {
        value = static_cast<T>(int64_t(value) / int64_t(divisor));
      } else {
        value = static_cast<T>(uint64_t(value) / uint64_t(divisor));
      }
    }
    putElement(out.data(), i, value);
  }
}

template <class Bits>
void expectSmall(
    const FloatFormat& format, ncclRedOp_t reduction, const std::vector<Bytes>& in, double divisor,
    Bytes& out) {
  const auto decoded = [&](size_t r, size_t i) {
    return static_cast<float>(format.decode(element<Bits>(in[r].data(), i)));
  };
  for (size_t i = 0; i < out.size() / sizeof(Bits); ++i) {
    float value = decoded(0, i);
    for (size_t r = 1; r < in.size(); ++r) value = combined(reduction, value, decoded(r, i));
    if (reduction == ncclAvg) value /= static_cast<float>(divisor);
    putElement(out.data(), i, static_cast<Bits>(format.encode(value)));
  }
}

void expect(
    ncclDataType_t type, ncclRedOp_t reduction, const std::vector<Bytes>& in, double divisor,
    Bytes& out) {
  switch (type) {
    case ncclInt8: return expectWide<int8_t>(reduction, in, divisor, out);
    case ncclUint8: return expectWide<uint8_t>(reduction, in, divisor, out);
    case ncclInt32: return expectWide<int32_t>(reduction, in, divisor, out);
    case ncclUint32: return expectWide<uint32_t>(reduction, in, divisor, out);
    case ncclInt64: return expectWide<int64_t>(reduction, in, divisor, out);
    case ncclUint64: return expectWide<uint64_t>(reduction, in, divisor, out);
    case ncclFloat32: return expectWide<float>(reduction, in, divisor, out);
    case ncclFloat64: return expectWide<double>(reduction, in, divisor, out);
    case ncclFloat16:
    case ncclBfloat16: return expectSmall<uint16_t>(formatOf(type), reduction, in, divisor, out);
    default: return expectSmall<uint8_t>(formatOf(type), reduction, in, divisor, out);
  }
}

bool isFloat(ncclDataType_t type) {
  return type >= ncclFloat16;
}

double floatAt(ncclDataType_t type, const Bytes& bytes, size_t i) {
  if (type == ncclFloat32) return element<float>(bytes.data(), i);
  if (type == ncclFloat64) return element<double>(bytes.data(), i);
  const bool wide = elementSize(type) == 2;
  return formatOf(type).decode(
      wide ? element<uint16_t>(bytes.data(), i) : element<uint8_t>(bytes.data(), i));
}

// Returns whether the bits are the same, where any NaN equals any other.
bool same(ncclDataType_t type, const Bytes& a, const Bytes& b) {
  if (a == b) return true;
  if (!isFloat(type)) return false;
  const size_t size = elementSize(type);
  for (size_t i = 0; i < a.size() / size; ++i) {
    if (std::memcmp(a.data() + i * size, b.data() + i * size, size) == 0) continue;
    if (!std::isnan(floatAt(type, a, i)) || !std::isnan(floatAt(type, b, i))) return false;
  }
  return true;
}

// Random bits: all numbers, subnormals, infinities and NaNs.
Bytes randomBytes(size_t size, unsigned seed) {
  std::mt19937_64 generator(seed);
  Bytes bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(generator());
  return bytes;
}

std::vector<const ReduceKernels*> variants() {
  std::vector<const ReduceKernels*> all{&kBaselineKernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    all.push_back(&kAvx2Kernels);
  }
#endif
  return all;
}

constexpr ncclRedOp_t kReductions[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg};

std::vector<const void*> addresses(const std::vector<Bytes>& in) {
  std::vector<const void*> pointers;
  for (const Bytes& bytes : in) pointers.push_back(bytes.data());
  return pointers;
}

// Checks a reduction. `divisor`: that of the average; 0: n.
void checkReduce(
    ncclDataType_t type, ncclRedOp_t reduction, int n, size_t count, double divisor = 0) {
  std::vector<Bytes> in;
  for (int r = 0; r < n; ++r) {
    in.push_back(randomBytes(count * elementSize(type), 100 * type + r));
  }
  Bytes wanted(count * elementSize(type));
  expect(type, reduction, in, divisor == 0 ? n : divisor, wanted);
  for (const ReduceKernels* variant : variants()) {
    // -1: an output of its own; otherwise the input that is overwritten.
    for (int target = -1; target < n; ++target) {
      std::vector<Bytes> inputs = in;
      Bytes own(wanted.size(), 0xee);
      Bytes& out = target < 0 ? own : inputs[target];
      if (n == 1) {
        torchcomms_pg::host::reduce(
            type, reduction, out.data(), addresses(inputs).data(), n, count);
      } else {
        const double by = divisor == 0 ? n : divisor;
        variant->reduce(type, reduction, out.data(), addresses(inputs).data(), n, count, by);
      }
      CHECK(same(type, out, wanted));
    }
  }
}

}  // namespace

// One thread computes, in which ThreadSanitizer finds no race, at twenty times the cost.
#if defined(__SANITIZE_THREAD__) || defined(EMULATED)
constexpr size_t kManyElements = 2001;
#else
constexpr size_t kManyElements = 70001;
#endif

TEST_WITHIN(everyTypeAndReductionMatchesTheReference, 120) {
  for (int type = 0; type < ncclNumTypes; ++type) {
    for (const ncclRedOp_t reduction : kReductions) {
      for (int n = 1; n <= 4; ++n) {
        for (const size_t count : {0, 1, 7, 1000}) {
          checkReduce(static_cast<ncclDataType_t>(type), reduction, n, count);
        }
      }
      checkReduce(static_cast<ncclDataType_t>(type), reduction, 2, kManyElements);
      checkReduce(static_cast<ncclDataType_t>(type), reduction, 3, kManyElements);
    }
  }
}

TEST(anAverageOfSumsIsDividedByTheNumberOfTheirRanks) {
  for (int type = 0; type < ncclNumTypes; ++type) {
    checkReduce(static_cast<ncclDataType_t>(type), ncclAvg, 2, 1000, 7);
    checkReduce(static_cast<ncclDataType_t>(type), ncclAvg, 3, 1000, 1);
  }
}

TEST_WITHIN(smallFloatsRoundOnceToNearestEven, 60) {
  // Every pair of 8-bit values; products reach every kind of rounding.
  for (const ncclDataType_t type : {ncclFloat8e4m3, ncclFloat8e5m2}) {
    std::vector<Bytes> in(2, Bytes(65536));
    for (size_t i = 0; i < 65536; ++i) {
      in[0][i] = static_cast<unsigned char>(i);
      in[1][i] = static_cast<unsigned char>(i >> 8);
    }
    for (const ncclRedOp_t reduction : {ncclSum, ncclProd, ncclAvg}) {
      Bytes wanted(65536), got(65536);
      expect(type, reduction, in, 2, wanted);
      for (const ReduceKernels* variant : variants()) {
        variant->reduce(type, reduction, got.data(), addresses(in).data(), 2, 65536, 2);
        CHECK(same(type, got, wanted));
      }
    }
  }
}

TEST(scaleMultipliesByOneElement) {
  constexpr size_t kCount = 5003;
  for (int number = 0; number < ncclNumTypes; ++number) {
    const auto type = static_cast<ncclDataType_t>(number);
    const size_t size = elementSize(type);
    for (unsigned seed = 0; seed < 8; ++seed) {
      const Bytes in = randomBytes(kCount * size, seed);
      const Bytes scalar = randomBytes(size, 50 + seed);
      Bytes repeated;
      for (size_t i = 0; i < kCount; ++i) {
        repeated.insert(repeated.end(), scalar.begin(), scalar.end());
      }
      Bytes wanted(in.size());
      expect(type, ncclProd, {in, repeated}, 2, wanted);
      for (const ReduceKernels* variant : variants()) {
        Bytes out(in.size()), inPlace = in;
        variant->scale(type, out.data(), in.data(), scalar.data(), kCount);
        variant->scale(type, inPlace.data(), inPlace.data(), scalar.data(), kCount);
        CHECK(same(type, out, wanted));
        CHECK(same(type, inPlace, wanted));
      }
    }
  }
}
