// Windows: memory of each rank that its peers can write to, without help from that rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "base/Mutex.hpp"
#include "comm/Communicator.hpp"

namespace torchcomms_pg {

// A window. Each rank of a communicator registers one tensor, of any size and dtype, and then puts
// data into the tensors of other ranks. Signals are counted for each window, sender and receiver; a
// wait takes one signal. A signal arrives after all puts, also asynchronous ones, that its sender
// has issued on the window before the signal.
//
// On an accelerator a put is a device copy into the peer's memory, which the library maps. NCCL's
// put would take only registered memory and would always signal. The library sends the signals.
//
// A batch may not contain operations of windows: one may wait for an earlier put, which the batch
// would hold back. Nor may a graph capture them: a signal counts once, not with each replay.
// Thread-safe.
class Window final {
 public:
  using Options = Communicator::Options;

  // Description of the tensor that a rank has registered.
  struct Part {
    c10::ScalarType dtype;
    std::vector<int64_t> sizes;
    int64_t numel = 0;
  };

  static bool supported(const Communicator& comm);
  // Makes a window. Collective. Raises NotImplementedError if windows are not supported.
  static std::shared_ptr<Window> make(const std::shared_ptr<Communicator>& comm);
  explicit Window(std::shared_ptr<Communicator> comm);  // see make()
  // Frees this rank's part of a registered window. The peers keep their parts.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Registers the contiguous `tensor`: moves its storage into memory of the library, see
  // moveToShared(), so that peers write to the tensor itself. With `owning` the window keeps a
  // reference to the tensor. NCCL requires the same number of bytes on all ranks. Collective.
  void registerTensor(const at::Tensor& tensor, bool owning);
  // Ends the registration. Collective; returns when no peer writes to the tensor any more. Drops
  // signals that no wait has taken.
  void deregister();

  // Writes `tensor`, of any strides, at element `offset` of the tensor that `destination` has
  // registered with the same dtype. After the end of the put, `tensor` may be reused. The
  // destination learns of the put only from a later signal.
  WorkPtr put(
      const at::Tensor& tensor, int64_t destination, int64_t offset, const Options& options);
  WorkPtr signal(int64_t peer, const Options& options);
  // Waits for the next signal of `peer`; if asynchronous, the Work ends with the signal. All puts
  // of `peer` before the signal have then arrived.
  WorkPtr waitSignal(int64_t peer, const Options& options);

  // Returns a tensor in the memory that `rank` has registered, not a copy. On the CPU the result
  // stays valid even after the window, since it keeps the memory mapped. On an accelerator it is
  // valid until the tensor is deregistered.
  at::Tensor mapRemoteTensor(int64_t rank) const;

  // Raises unless `rank` is a rank of the communicator.
  void checkRank(const char* what, const char* argument, int64_t rank) const;

  // Returns the description of this rank's tensor, or nullopt if no tensor is registered.
  std::optional<Part> part() const;
  // Returns this rank's tensor, or nullopt if none is registered or the window does not own it.
  std::optional<at::Tensor> tensor() const;

  // Returns a finished Work for a caller that needs one after a synchronous operation.
  WorkPtr finishedWork(OpKind kind) const { return comm_->finishedWork(kind, {}); }

  const at::Device& device() const { return comm_->device(); }

 private:
  struct Registration;

  // Returns whether registration maps the memory of all peers, for puts to copy to. True on an
  // accelerator. On the CPU the library does the puts, and mapRemoteTensor() asks it for a view.
  bool mapsPeers() const { return !device().is_cpu(); }
  std::shared_ptr<Registration> registered(const char* what) const;
  void refuseDeferral(const char* what) const;
  WorkPtr launch(Registration& registration, PreparedOp call);
  ncclResult_t exchange(
      Collective collective, const at::Tensor& input, const at::Tensor& output, ncclComm_t comm,
      cudaStream_t stream) const;
  ncclResult_t describeAll(Registration& registration, ncclComm_t comm, cudaStream_t stream) const;
  ncclResult_t mapAll(Registration& registration, ncclComm_t comm, cudaStream_t stream) const;
  void forget(std::shared_ptr<Registration> registration) noexcept;

  const std::shared_ptr<Communicator> comm_;
  mutable Mutex mutex_;
  // Null if no tensor is registered.
  std::shared_ptr<Registration> registration_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg
