// Arithmetic on buffers of NCCL's data types. No other code of the host libraries interprets the
// contents of a buffer.
#pragma once

#include <nccl.h>

#include <cstddef>

#include "nccl/Collective.hpp"

namespace torchcomms_pg::host {

// Combines in[0][i] to in[n - 1][i], in this order, by `op` into out[i], for each i < `count`.
//
// `out` may be one of the inputs, but may not overlap an input otherwise. 16- and 8-bit floats
// accumulate in float32 and are rounded once, to nearest even; e4m3 has no infinity and saturates,
// as in NCCL and in torch from 2.15 on. Integers wrap around; their average truncates towards zero.
// Max and min propagate NaN. If n >= 2, the average is the sum divided by `divisor`, or by n if
// `divisor` is 0. Pass a divisor, whole for integers, if the inputs are sums over several ranks.
void reduce(
    ncclDataType_t type, ncclRedOp_t op, void* out, const void* const* in, int n, size_t count,
    double divisor = 0);

// Computes out[i] = in[i] * *scalar; `scalar` points to one element of the same type. `out` may be
// `in`.
void scale(ncclDataType_t type, void* out, const void* in, const void* scalar, size_t count);

// Copies `bytes` bytes. `out` may be `in`, but the two may not overlap otherwise.
void copy(void* out, const void* in, size_t bytes);

}  // namespace torchcomms_pg::host
