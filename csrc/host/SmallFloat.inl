// Floats of 16 and 8 bits and their conversions to and from float32. The conversions have no
// branches, so that compilers vectorise loops over them.
//
// The file of each instruction set includes this file once, in an unnamed namespace, after <bit>,
// <cstddef>, <cstdint>, <functional> and <type_traits>.

// Returns `yes` if `condition` is true, and else `no`. For a conditional operator, compilers would
// move floating point operations into a branch, which cannot be vectorised.
inline uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -uint32_t(condition);
  return (yes & mask) | (no & ~mask);
}

// An IEEE-like format: `exponent` and `mantissa` bits below the sign. A `finite` format has no
// infinity: if all these bits are set, the value is NaN. Values that are too large become the
// largest number, as in NCCL and in torch from 2.15 on.
template <int exponent, int mantissa, bool finite>
struct SmallFloat {
  using Bits = std::conditional_t<1 + exponent + mantissa == 8, uint8_t, uint16_t>;

  static constexpr int kWidth = 1 + exponent + mantissa;
  static constexpr int kDrop = 23 - mantissa;  // number of mantissa bits that only float32 has
  static constexpr int kBias = (1 << (exponent - 1)) - 1;
  static constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  static constexpr uint32_t kSign = uint32_t{1} << (kWidth - 1);
  static constexpr uint32_t kInfinity = ((1u << exponent) - 1) << mantissa;
  static constexpr uint32_t kNan = kSign - 1;
  static constexpr uint32_t kOverflow = finite ? kNan - 1 : kInfinity;

  Bits bits;

  static float widen(SmallFloat value) {
    const uint32_t all = value.bits;
    const uint32_t sign = (all & kSign) << (32 - kWidth);
    const uint32_t magnitude = all & (kSign - 1);
    const uint32_t normal = (magnitude << kDrop) + kRebias;
    // The product is exact. Unlike a product with a float32 subnormal, it does not depend on the
    // thread's flush-to-zero mode.
    constexpr float kUnit = 1.0f / float(uint64_t{1} << (kBias - 1 + mantissa));
    const uint32_t tiny = std::bit_cast<uint32_t>(float(int32_t(magnitude)) * kUnit);
    uint32_t result = select(magnitude < (1u << mantissa), tiny, normal);
    if constexpr (finite) {
      result = select(magnitude == kNan, 0x7fc00000u, result);
    } else {
      // Makes a NaN quiet, as hardware conversions do.
      const uint32_t special = 0x7f800000u | (magnitude << kDrop);
      result = select(magnitude >= kInfinity, special, result);
      result |= select(magnitude > kInfinity, 0x00400000u, 0);
    }
    return std::bit_cast<float>(sign | result);
  }

  static SmallFloat narrow(float value) {
    const uint32_t all = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (all >> (32 - kWidth)) & kSign;
    const uint32_t magnitude = all & 0x7fffffffu;
    // Rounding may carry into the exponent, which is then right, too.
    const uint32_t even = (magnitude >> kDrop) & 1;
    const uint32_t rounded = magnitude - kRebias + ((1u << (kDrop - 1)) - 1) + even;
    uint32_t normal = rounded >> kDrop;
    normal = select(normal > kOverflow, kOverflow, normal);
    // For values below the smallest normal: after adding 2^k, float32 itself rounds at the format's
    // last bit.
    constexpr uint32_t kMagic = uint32_t(127 + 1 - kBias - mantissa + 23) << 23;
    const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kMagic);
    const uint32_t tiny = std::bit_cast<uint32_t>(shifted) - kMagic;
    uint32_t result = select(magnitude < kRebias + (1u << 23), tiny, normal);
    uint32_t nan = kNan;
    if constexpr (kWidth == 16) {
      // Keeps a NaN's payload, as the hardware conversion does.
      constexpr uint32_t kPayload = (1u << mantissa) - 1;
      nan = kInfinity | (1u << (mantissa - 1)) | ((magnitude >> kDrop) & kPayload);
    }
    result = select(magnitude > 0x7f800000u, nan, result);
    return {static_cast<Bits>(sign | result)};
  }
};

// bfloat16 is the upper half of a float32, so subnormals are no special case.
struct Bfloat16 {
  uint16_t bits;

  static float widen(Bfloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }

  static uint32_t round(float value) {
    const uint32_t all = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (all + 0x7fffu + ((all >> 16) & 1)) >> 16;
    return (all & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
  }

  static Bfloat16 narrow(float value) { return {static_cast<uint16_t>(round(value))}; }
};

using Float16 = SmallFloat<5, 10, false>;
using Float8e5m2 = SmallFloat<5, 2, false>;
using Float8e4m3 = SmallFloat<4, 3, true>;

template <class Small>
void widen(float* out, const Small* in, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = Small::widen(in[i]);
  }
}

template <class Small>
void narrow(Small* out, const float* in, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = Small::narrow(in[i]);
  }
}
