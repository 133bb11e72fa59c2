// Every difference between the supported versions of torch, 2.11 to 2.15.
#pragma once

#include <c10/core/Stream.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/Capture.hpp"

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "torchcomms_pg needs torch 2.11 or later"
#endif

#define TORCHCOMMS_PG_TORCH_AT_LEAST(minor) (TORCH_VERSION_MINOR >= (minor))

// From 2.14 on the dispatcher calls the *_single names, and c10d::Backend
// forwards the old names to them; before, only the old names exist.
#if TORCHCOMMS_PG_TORCH_AT_LEAST(14)
#define TORCHCOMMS_PG_ALL_GATHER_SINGLE all_gather_single
#define TORCHCOMMS_PG_ALL_GATHER_SINGLE_COALESCED all_gather_single_coalesced
#define TORCHCOMMS_PG_REDUCE_SCATTER_SINGLE reduce_scatter_single
#define TORCHCOMMS_PG_REDUCE_SCATTER_SINGLE_COALESCED reduce_scatter_single_coalesced
#define TORCHCOMMS_PG_ALL_TO_ALL_SINGLE all_to_all_single
// A virtual that is new in 2.14.
#define TORCHCOMMS_PG_OVERRIDE_FROM_14 override
#else
#define TORCHCOMMS_PG_ALL_GATHER_SINGLE _allgather_base
#define TORCHCOMMS_PG_ALL_GATHER_SINGLE_COALESCED allgather_into_tensor_coalesced
#define TORCHCOMMS_PG_REDUCE_SCATTER_SINGLE _reduce_scatter_base
#define TORCHCOMMS_PG_REDUCE_SCATTER_SINGLE_COALESCED reduce_scatter_tensor_coalesced
#define TORCHCOMMS_PG_ALL_TO_ALL_SINGLE alltoall_base
#define TORCHCOMMS_PG_OVERRIDE_FROM_14
#endif

// Whether an operation is asynchronous is part of its record since this macro
// exists; it takes that as one more argument, the last.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define TORCHCOMMS_PG_RECORD_PARAM_COMMS RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#else
#define TORCHCOMMS_PG_RECORD_PARAM_COMMS( \
    seq,                                  \
    group,                                \
    inputs,                               \
    outputs,                              \
    rank,                                 \
    name,                                 \
    numelIn,                              \
    numelOut,                             \
    dtype,                                \
    splitsIn,                             \
    splitsOut,                            \
    start,                                \
    stride,                               \
    size,                                 \
    async)                                \
  RECORD_PARAM_COMMS_DATA(                \
      seq,                                \
      group,                              \
      inputs,                             \
      outputs,                            \
      rank,                               \
      name,                               \
      numelIn,                            \
      numelOut,                           \
      dtype,                              \
      splitsIn,                           \
      splitsOut,                          \
      start,                              \
      stride,                             \
      size)
#endif

// Likewise in 2.12 and 2.15.
#if TORCHCOMMS_PG_TORCH_AT_LEAST(12)
#define TORCHCOMMS_PG_OVERRIDE_FROM_12 override
#else
#define TORCHCOMMS_PG_OVERRIDE_FROM_12
#endif
#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
#define TORCHCOMMS_PG_OVERRIDE_FROM_15 override
#else
#define TORCHCOMMS_PG_OVERRIDE_FROM_15
#endif

namespace torchcomms_pg {

// Whether torch's analyser of flight recorders knows the names "split" and "new_window".
inline constexpr bool kAnalyserKnowsSplits = TORCHCOMMS_PG_TORCH_AT_LEAST(13);

// A source that is not known yet, as torch's analyser of flight recorders takes it.
inline constexpr const char* kUnknownSource = TORCHCOMMS_PG_TORCH_AT_LEAST(15) ? "?" : "-1";

// Whether what is queued in the stream goes into a graph, and does not run.
inline bool isCapturing(const c10::Stream& stream) {
  // CUDA refuses to capture its legacy stream, which is torch's default one (CUDA Runtime API,
  // cudaStreamBeginCapture): most operations are spared a call.
  if (stream.device_type() == c10::DeviceType::CUDA && stream.id() == 0) {
    return false;
  }
#if TORCHCOMMS_PG_TORCH_AT_LEAST(12)
  return stream.is_capturing();
#else
  return stream.device_type() == c10::DeviceType::CUDA &&
         isCudaCapturing(static_cast<cudaStream_t>(stream.native_handle()));
#endif
}

}  // namespace torchcomms_pg
