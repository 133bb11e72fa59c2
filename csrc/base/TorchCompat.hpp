// Handles every difference between the supported versions of torch, 2.11 to 2.15.
#pragma once

#include <c10/core/Stream.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "base/Capture.hpp"

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "torchcomms_pg needs torch 2.11 or later"
#endif

#define TORCHCOMMS_PG_TORCH_AT_LEAST(minor) (TORCH_VERSION_MINOR >= (minor))

// Records an operation as RECORD_PARAM_COMMS_DATA does. `async` comes first in this macro and last
// in torch's RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP; older versions of torch have no such argument.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define TORCHCOMMS_PG_RECORD_PARAM_COMMS(async, ...) \
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, async)
#else
#define TORCHCOMMS_PG_RECORD_PARAM_COMMS(async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif

namespace torchcomms_pg {

// c10d as in the newest supported version, so that one set of overriding methods serves every
// version. Declares what an older version lacks. That version calls these declarations only if a
// comment says so.
#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
namespace latest = ::c10d;
#else
namespace latest {

using namespace ::c10d;

struct CompletionHookArgs {
  uint64_t completionKey = 0;
  std::optional<float> duration_ms;
};
using CompletionHook = std::function<void(const CompletionHookArgs&)>;

#if !TORCHCOMMS_PG_TORCH_AT_LEAST(14)
enum class HookOpName : uint8_t {
  SEND,
  RECV,
  BROADCAST,
  ALLREDUCE,
  REDUCE,
  ALLGATHER,
  REDUCE_SCATTER,
  ALLTOALL,
  BARRIER,
  SCATTER,
  GATHER,
  SPLIT,
  NEW_WINDOW,
  UNKNOWN,
};

struct PreHookArgs {
  HookOpName name = HookOpName::UNKNOWN;
  bool async_op = false;
  std::vector<at::Tensor> input_tensors;
  std::vector<at::Tensor> output_tensors;
  int64_t root = -1;
  int64_t op_id = 0;
};

struct PostHookArgs {
  HookOpName name = HookOpName::UNKNOWN;
  bool async_op = false;
  c10::intrusive_ptr<::c10d::Work> work;
  int64_t op_id = 0;
};

using PreHook = std::function<void(const PreHookArgs&)>;
using PostHook = std::function<void(const PostHookArgs&)>;

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Splits = std::vector<int64_t>;

using AbortHook = std::function<void()>;
using ReconfigureHandle = std::string;

struct ReconfigureOptions {
  int64_t uuid = 0;
  std::variant<std::unordered_set<ReconfigureHandle>, std::vector<ReconfigureHandle>> handles;
  std::optional<std::chrono::milliseconds> timeout;
};

struct OneSidedOptions {
  std::chrono::milliseconds timeout = ::c10d::kUnsetTimeout;
};
using PutOptions = OneSidedOptions;
using SignalOptions = OneSidedOptions;
using WaitSignalOptions = OneSidedOptions;

enum class WindowAccessType : uint8_t { UNIFIED };

struct WindowAttr {
  WindowAccessType access_type = WindowAccessType::UNIFIED;
};

class Window : public torch::CustomClassHolder {
 public:
  virtual void tensor_register(const at::Tensor& tensor, bool owning) = 0;
  virtual void tensor_deregister() = 0;
  virtual WorkPtr put(
      const at::Tensor& tensor, int64_t destination, int64_t offset, bool async,
      const PutOptions& opts) = 0;
  virtual WorkPtr signal(int64_t peer, bool async, const SignalOptions& opts) = 0;
  virtual WorkPtr wait_signal(int64_t peer, bool async, const WaitSignalOptions& opts) = 0;
  virtual at::Tensor map_remote_tensor(int64_t rank) = 0;
  virtual WindowAttr get_attr(int64_t peer) = 0;
};
#endif

class Work : public ::c10d::Work {
 public:
  using ::c10d::Work::Work;

#if !TORCHCOMMS_PG_TORCH_AT_LEAST(14)
  virtual std::chrono::milliseconds getTimeout() const = 0;
#endif
  virtual uint64_t getCompletionKey() const { return 0; }
};

class Backend : public ::c10d::Backend {
 public:
  using ::c10d::Backend::Backend;

#if !TORCHCOMMS_PG_TORCH_AT_LEAST(12)
  virtual void suspend() = 0;
  virtual void resume() = 0;
  virtual std::unordered_map<std::string, uint64_t> getMemoryStats() = 0;
#endif

#if !TORCHCOMMS_PG_TORCH_AT_LEAST(14)
  struct Options : ::c10d::Backend::Options {
    using ::c10d::Backend::Options::Options;

    virtual c10::intrusive_ptr<::c10d::Backend::Options> clone() const = 0;

    static constexpr bool enable_reconfigure = false;
  };

  // Names of 2.14 and later. An older torch calls the old names, which forward to the new ones.
  virtual WorkPtr all_gather_single(
      at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) = 0;
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) final {
    return all_gather_single(output, input, opts);
  }
  virtual WorkPtr all_gather_single_coalesced(
      Tensors& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) = 0;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) final {
    return all_gather_single_coalesced(outputs, inputs, opts);
  }
  virtual WorkPtr reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const ::c10d::ReduceScatterOptions& opts) = 0;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const ::c10d::ReduceScatterOptions& opts) final {
    return reduce_scatter_single(output, input, opts);
  }
  virtual WorkPtr reduce_scatter_single_coalesced(
      Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& opts) = 0;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& opts) final {
    return reduce_scatter_single_coalesced(outputs, inputs, opts);
  }
  virtual WorkPtr all_to_all_single(
      at::Tensor& output, at::Tensor& input, Splits& outputSplits, Splits& inputSplits,
      const ::c10d::AllToAllOptions& opts) = 0;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, Splits& outputSplits, Splits& inputSplits,
      const ::c10d::AllToAllOptions& opts) final {
    return all_to_all_single(output, input, outputSplits, inputSplits, opts);
  }
  virtual WorkPtr gather_single(
      at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts) = 0;

  virtual void addEphemeralTimeout(const std::chrono::milliseconds& timeout) = 0;
  virtual bool supportsReconfigure() const = 0;
  virtual ReconfigureHandle get_reconfigure_handle() const = 0;
  virtual WorkPtr reconfigure(const ReconfigureOptions& opts) = 0;
  virtual bool supportsWindow() const = 0;
  virtual c10::intrusive_ptr<Window> new_window(const std::optional<at::Tensor>& tensor) = 0;
  virtual void registerAbortHook(int64_t id, AbortHook hook) = 0;
  virtual void unregisterAbortHook(int64_t id) = 0;

 protected:
  // Copies that reconfigure() writes: the members of an older torch are const.
  int rank_ = getRank();
  int size_ = getSize();

 public:
#endif
  virtual bool isInitialized() = 0;
  virtual bool supportsCompletionHooks() const = 0;
  virtual void registerCompletionHook(int64_t id, CompletionHook hook) = 0;
  virtual void unregisterCompletionHook(int64_t id) = 0;
  virtual bool supportsAbortHooks() const = 0;
};

}  // namespace latest
#endif

// True if c10d calls hooks for the operations of every group.
inline constexpr bool kGroupsHaveHooks = TORCHCOMMS_PG_TORCH_AT_LEAST(14);

// Makes c10d call the hooks from the group's next operation on. `id` must differ from the ids of
// other hooks. Does nothing without kGroupsHaveHooks.
inline void registerHooks(
    [[maybe_unused]] c10d::ProcessGroup& group, [[maybe_unused]] int64_t id,
    [[maybe_unused]] latest::PreHook pre, [[maybe_unused]] latest::PostHook post) {
#if TORCHCOMMS_PG_TORCH_AT_LEAST(14)
  group.registerPreHook(id, std::move(pre));
  group.registerPostHook(id, std::move(post));
#endif
}

// Returns torch 2.14's name of the operation, which all its variants share.
inline latest::HookOpName familyOf(latest::HookOpName name) {
  using Name [[maybe_unused]] = latest::HookOpName;
  switch (name) {
#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
    case Name::ALLREDUCE_COALESCED: return Name::ALLREDUCE;
    case Name::ALLGATHER_BASE:
    case Name::ALLGATHER_COALESCED:
    case Name::ALLGATHER_INTO_TENSOR_COALESCED: return Name::ALLGATHER;
    case Name::REDUCE_SCATTER_BASE:
    case Name::REDUCE_SCATTER_TENSOR_COALESCED: return Name::REDUCE_SCATTER;
    case Name::ALLTOALL_BASE: return Name::ALLTOALL;
#endif
    default: return name;
  }
}

// Makes the backend call `hook`, with the work's key, whenever a work has completed. Returns false
// if the backend has no such hooks; no backend has them up to torch 2.14.
inline bool registerCompletionHook(
    [[maybe_unused]] c10d::Backend& backend, [[maybe_unused]] int64_t id,
    [[maybe_unused]] latest::CompletionHook hook) {
#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
  if (backend.supportsCompletionHooks()) {
    backend.registerCompletionHook(id, std::move(hook));
    return true;
  }
#endif
  return false;
}

// Returns the key that registerCompletionHook()'s hook gets for the work, or 0 if no hook is
// called.
inline uint64_t completionKey([[maybe_unused]] const c10d::Work& work) {
#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
  return work.getCompletionKey();
#else
  return 0;
#endif
}

// True if torch's analyser of flight recorders knows the names "split" and "new_window".
inline constexpr bool kAnalyserKnowsSplits = TORCHCOMMS_PG_TORCH_AT_LEAST(13);

// Text for the unknown source of a receive, as torch's analyser of flight recorders expects it.
inline constexpr const char* kUnknownSource = TORCHCOMMS_PG_TORCH_AT_LEAST(15) ? "?" : "-1";

// Returns whether a graph captures the stream: work queued in it is recorded and not run.
inline bool isCapturing(const c10::Stream& stream) {
  // Saves most operations a call: torch's default stream is CUDA's legacy stream, which cannot be
  // captured (CUDA Runtime API, cudaStreamBeginCapture).
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
