// Arithmetic on buffers of NCCL's data types. No other code of the library interprets the contents
// of a buffer.
#pragma once

#include <nccl.h>

#include <cstddef>

#include "nccl/ElementSize.hpp"

namespace torchcomms_pg::host {

// Computes out[i] = op over r = 0 .. n-1, in that order, of in[r][i].
//
// `out` may be exactly in[r] for some r, but may not overlap one otherwise. 16- and 8-bit floats
// accumulate in float32 and are rounded once, to nearest even; e4m3 has no infinity and saturates,
// as in NCCL and in torch from 2.15 on. Integers wrap around; their average truncates towards zero.
// `divisor` divides the average (n >= 2); pass it if the inputs are already sums over several
// ranks. It is a whole number for integers; 0 means n. Max and min propagate NaN.
void reduce(
    ncclDataType_t type,
    ncclRedOp_t op,
    void* out,
    const void* const* in,
    int n,
    size_t count,
    double divisor = 0);

// Computes out[i] = in[i] * *scalar; `scalar` points to one element of the same type. `out` may be
// `in`.
void scale(ncclDataType_t type, void* out, const void* in, const void* scalar, size_t count);

// Copies `bytes` bytes. `out` may be `in`; they may not overlap otherwise.
void copy(void* out, const void* in, size_t bytes);

}  // namespace torchcomms_pg::host
