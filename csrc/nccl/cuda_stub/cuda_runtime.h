// The few names nccl.h takes from the CUDA runtime, so that it can be parsed
// where no CUDA toolkit is installed. NCCL passes these by pointer or as
// opaque handles only, so the layouts do not matter.
#pragma once
#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
