// Elements of every data type, from and to numbers.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace test {

inline const std::vector<ncclDataType_t> kTypes = {
    ncclInt8,    ncclUint8,   ncclInt32,   ncclUint32,   ncclInt64,      ncclUint64,
    ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2};

inline size_t bytesOf(ncclDataType_t type) {
  constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[type];
}

// A float format of up to 16 bits.
struct FloatFormat {
  int exponentBits, mantissaBits;
  bool infinity;

  int width() const { return 1 + exponentBits + mantissaBits; }
  uint32_t sign() const { return 1u << (width() - 1); }

  double decode(uint32_t bits) const {
    const int bias = (1 << (exponentBits - 1)) - 1;
    const uint32_t magnitude = bits & (sign() - 1);
    const int e = static_cast<int>(magnitude >> mantissaBits);
    const double fraction = magnitude & ((1u << mantissaBits) - 1);
    const int top = (1 << exponentBits) - 1;
    double value = 0;
    if (infinity && e == top) {
      value = fraction == 0 ? HUGE_VAL : NAN;
    } else if (!infinity && magnitude == sign() - 1) {
      value = NAN;
    } else if (e == 0) {
      value = std::ldexp(fraction, 1 - bias - mantissaBits);
    } else {
      value = std::ldexp(fraction + (1 << mantissaBits), e - bias - mantissaBits);
    }
    return bits & sign() ? -value : value;
  }

  // Rounds to nearest by bisection of the positive numbers, whose order is that of their bits.
  uint32_t encode(float number) const {
    const uint32_t nan = sign() - 1;
    if (std::isnan(number)) return nan;
    const uint32_t negative = std::signbit(number) ? sign() : 0;
    const double value = std::fabs(static_cast<double>(number));
    const uint32_t top = infinity ? ((1u << exponentBits) - 1) << mantissaBits : nan - 1;
    uint32_t low = 0, high = top;  // the answer is one of those between
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (decode(middle) <= value ? low : high) = middle;
    }
    // Infinity counts as the number that would follow the largest one.
    const double below = decode(low);
    double above = decode(high);
    if (infinity && high == top) above = below + (below - decode(low - 1));
    const bool up = value - below > above - value || (value - below == above - value && low % 2);
    return negative | (up ? high : low);
  }
};

inline FloatFormat formatOf(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16: return {5, 10, true};
    case ncclBfloat16: return {8, 7, true};
    case ncclFloat8e4m3: return {4, 3, false};
    case ncclFloat8e5m2: return {5, 2, true};
    default: return {0, 0, false};
  }
}

// Returns the bits of a number that the format holds exactly as a normal number or zero.
inline uint32_t encodeFloat(FloatFormat format, double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(value), &exponent);  // in [0.5, 1)
  const int bias = (1 << (format.exponentBits - 1)) - 1;
  const auto mantissa = static_cast<uint32_t>((fraction * 2 - 1) * (1 << format.mantissaBits));
  return static_cast<uint32_t>(value < 0) << (format.exponentBits + format.mantissaBits) |
         static_cast<uint32_t>(exponent - 1 + bias) << format.mantissaBits | mantissa;
}

inline void store(ncclDataType_t type, void* buffer, size_t index, double value) {
  auto* at = static_cast<std::byte*>(buffer) + index * bytesOf(type);
  const auto put = [at](auto element) { std::memcpy(at, &element, sizeof element); };
  switch (type) {
    case ncclInt8: return put(static_cast<int8_t>(value));
    case ncclUint8: return put(static_cast<uint8_t>(value));
    case ncclInt32: return put(static_cast<int32_t>(value));
    case ncclUint32: return put(static_cast<uint32_t>(value));
    case ncclInt64: return put(static_cast<int64_t>(value));
    case ncclUint64: return put(static_cast<uint64_t>(value));
    case ncclFloat32: return put(static_cast<float>(value));
    case ncclFloat64: return put(value);
    case ncclFloat16:
    case ncclBfloat16: return put(static_cast<uint16_t>(encodeFloat(formatOf(type), value)));
    default: return put(static_cast<uint8_t>(encodeFloat(formatOf(type), value)));
  }
}

using Buffer = std::vector<std::byte>;

// Period of the elements' values, so that large buffers are filled by copies. It is a prime: a part
// that landed in the place of another one has other values.
inline constexpr size_t kPeriod = 4099;

// Returns `count` elements, element i being value(i % kPeriod).
template <class Value>
Buffer elements(ncclDataType_t type, size_t count, const Value& value) {
  Buffer buffer(count * bytesOf(type));
  for (size_t i = 0; i < std::min(count, kPeriod); ++i) store(type, buffer.data(), i, value(i));
  const size_t period = kPeriod * bytesOf(type);
  for (size_t filled = period; filled < buffer.size(); filled *= 2) {
    std::memcpy(&buffer[filled], buffer.data(), std::min(filled, buffer.size() - filled));
  }
  return buffer;
}

}  // namespace test
