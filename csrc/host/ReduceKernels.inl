// The arithmetic itself. The file of each instruction set includes this file once, in an unnamed
// namespace after SmallFloat.inl, so that no two variants share a symbol. The namespace may contain
// faster overloads of `widen` and `narrow`.

// The type in which to compute with T: for integers an unsigned type, which wraps around instead of
// overflowing.
template <class T>
using Wrapping = std::conditional_t<
    std::is_integral_v<T>, std::conditional_t<(sizeof(T) < 8), uint32_t, uint64_t>, T>;

template <class Function>
struct Arithmetic {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(Function()(Wrapping<T>(a), Wrapping<T>(b)));
  }
};

// Propagates NaN: `a != a` is true if `a` is NaN. If only `b` is NaN, the condition is false and
// `b` is the result.
template <class Before>
struct Extreme {
  template <class T>
  static T apply(T a, T b) {
    return Before()(a, b) || a != a ? a : b;
  }
};

using Sum = Arithmetic<std::plus<>>;
using Product = Arithmetic<std::multiplies<>>;
using Maximum = Extreme<std::greater<>>;
using Minimum = Extreme<std::less<>>;

// About `ivdep` below: `out` may be exactly one of the inputs, which is harmless. Without `ivdep`,
// the compiler's test for overlaps would choose a scalar loop in this case.

template <class Operation, class T>
void combine(T* out, const T* a, const T* b, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    out[i] = Operation::apply(a[i], b[i]);
  }
}

template <class T>
void divide(T* out, double divisor, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_floating_point_v<T>) {
      out[i] /= T(divisor);
    } else {
      using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
      out[i] = static_cast<T>(Wide(out[i]) / Wide(divisor));
    }
  }
}

// Number of elements in a block, so few that a block's buffers stay in the first-level cache.
inline constexpr size_t kBlock = 1024;

template <class Operation, class T>
void reduceWide(double divisor, T* out, const void* const* in, int n, size_t count) {
  T buffer[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t size = count - start < kBlock ? count - start : kBlock;
    const T* sum = static_cast<const T*>(in[0]) + start;
    for (int r = 1; r < n; ++r) {
      // `out` may be an input that has not been read yet, so only the last step writes to `out`.
      T* target = r == n - 1 ? out + start : buffer;
      combine<Operation>(target, sum, static_cast<const T*>(in[r]) + start, size);
      sum = target;
    }
    if (divisor != 1) {
      divide(out + start, divisor, size);
    }
  }
}

// Combines pairs of bfloat16 in 32-bit words, which avoids the shuffles of widening a vector.
template <class Operation>
void combinePairs(Bfloat16* out, const Bfloat16* a, const Bfloat16* b, size_t count) {
  const size_t pairs = count / 2;
#pragma GCC ivdep
  for (size_t i = 0; i < pairs; ++i) {
    // Buffers may be aligned to two bytes only.
    uint32_t x, y;
    __builtin_memcpy(&x, a + 2 * i, sizeof x);
    __builtin_memcpy(&y, b + 2 * i, sizeof y);
    const float low =
        Operation::apply(std::bit_cast<float>(x << 16), std::bit_cast<float>(y << 16));
    const float high = Operation::apply(
        std::bit_cast<float>(x & 0xffff0000u), std::bit_cast<float>(y & 0xffff0000u));
    const uint32_t pair = Bfloat16::round(low) | Bfloat16::round(high) << 16;
    __builtin_memcpy(out + 2 * i, &pair, sizeof pair);
  }
  if (count % 2 != 0) {
    const size_t last = count - 1;
    const float value = Operation::apply(Bfloat16::widen(a[last]), Bfloat16::widen(b[last]));
    out[last] = Bfloat16::narrow(value);
  }
}

template <class Operation, class Small>
void reduceSmall(double divisor, Small* out, const void* const* in, int n, size_t count) {
  if constexpr (std::is_same_v<Small, Bfloat16>) {
    if (n == 2 && divisor == 1) {
      return combinePairs<Operation>(
          out, static_cast<const Small*>(in[0]), static_cast<const Small*>(in[1]), count);
    }
  }
  float sum[kBlock];
  float next[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t size = count - start < kBlock ? count - start : kBlock;
    widen(sum, static_cast<const Small*>(in[0]) + start, size);
    for (int r = 1; r < n; ++r) {
      widen(next, static_cast<const Small*>(in[r]) + start, size);
      combine<Operation>(sum, sum, next, size);
    }
    if (divisor != 1) {
      divide(sum, divisor, size);
    }
    narrow(out + start, sum, size);
  }
}

template <class T>
void scaleTyped(T* out, const T* in, const T* scalar, size_t count) {
  if constexpr (std::is_arithmetic_v<T>) {
    const T factor = *scalar;
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
      out[i] = Product::apply(in[i], factor);
    }
  } else {
    float factor = 0;
    widen(&factor, scalar, 1);
    float buffer[kBlock];
    for (size_t start = 0; start < count; start += kBlock) {
      const size_t size = count - start < kBlock ? count - start : kBlock;
      widen(buffer, in + start, size);
      for (size_t i = 0; i < size; ++i) {
        buffer[i] *= factor;
      }
      narrow(out + start, buffer, size);
    }
  }
}

// Calls use() with a null pointer to T, the C++ type of `type`.
template <class Use>
void withType(ncclDataType_t type, Use use) {
  switch (type) {
    case ncclInt8: return use(static_cast<int8_t*>(nullptr));
    case ncclUint8: return use(static_cast<uint8_t*>(nullptr));
    case ncclInt32: return use(static_cast<int32_t*>(nullptr));
    case ncclUint32: return use(static_cast<uint32_t*>(nullptr));
    case ncclInt64: return use(static_cast<int64_t*>(nullptr));
    case ncclUint64: return use(static_cast<uint64_t*>(nullptr));
    case ncclFloat16: return use(static_cast<Float16*>(nullptr));
    case ncclFloat32: return use(static_cast<float*>(nullptr));
    case ncclFloat64: return use(static_cast<double*>(nullptr));
    case ncclBfloat16: return use(static_cast<Bfloat16*>(nullptr));
    case ncclFloat8e4m3: return use(static_cast<Float8e4m3*>(nullptr));
    case ncclFloat8e5m2: return use(static_cast<Float8e5m2*>(nullptr));
    case ncclNumTypes: return;
  }
}

void reduceAny(
    ncclDataType_t type, ncclRedOp_t op, void* out, const void* const* in, int n, size_t count,
    double divisor) {
  withType(type, [&]<class T>(T*) {
    const auto with = [&]<class Operation>(Operation, double by = 1) {
      if constexpr (std::is_arithmetic_v<T>) {
        reduceWide<Operation>(by, static_cast<T*>(out), in, n, count);
      } else {
        reduceSmall<Operation>(by, static_cast<T*>(out), in, n, count);
      }
    };
    switch (op) {
      case ncclSum: return with(Sum());
      case ncclAvg: return with(Sum(), divisor);
      case ncclProd: return with(Product());
      case ncclMax: return with(Maximum());
      case ncclMin: return with(Minimum());
      default: return;
    }
  });
}

void scaleAny(ncclDataType_t type, void* out, const void* in, const void* scalar, size_t count) {
  withType(type, [&]<class T>(T*) {
    scaleTyped(
        static_cast<T*>(out), static_cast<const T*>(in), static_cast<const T*>(scalar), count);
  });
}
