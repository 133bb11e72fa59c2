// The names that nccl.h takes from the CUDA runtime, for builds without a CUDA toolkit. NCCL passes
// these types only by pointer or as opaque handles, so their layouts do not matter.
#pragma once
#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
