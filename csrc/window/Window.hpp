// Memory of every rank that its peers can write to without its help.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg {

// A window: each rank of a communicator registers one tensor, of any size and dtype, and then puts
// into the tensors of others. Signals are counted per window and ordered pair of ranks; a wait
// takes one signal. A signal follows all puts, asynchronous ones included, that its rank issued on
// the window before it.
//
// On an accelerator a put is a device copy into the peer's memory, which the library maps: NCCL's
// own put takes registered memory only and always signals. Signals are the library's.
//
// Batches refuse its operations: one may wait for an earlier put, which the batch would hold back.
// Graphs refuse them too: a signal counts once, not with each replay. Thread-safe.
class Window final {
 public:
  using Options = Communicator::Options;

  // Description of the tensor that a rank has registered.
  struct Part {
    c10::ScalarType dtype;
    std::vector<int64_t> sizes;
    int64_t numel;
  };

  static bool supported(const Communicator& comm);
  // Makes a window. Collective. Raises NotImplementedError if windows are not supported.
  static std::shared_ptr<Window> make(const std::shared_ptr<Communicator>& comm);
  explicit Window(std::shared_ptr<Communicator> comm);  // see make()
  // Frees this rank's part of a registered window; its peers keep theirs.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Registers the contiguous `tensor`: moves its storage into shared memory (see moveToShared), so
  // that peers write into this very tensor. With `owning` the window keeps a reference to the
  // tensor. NCCL requires the same number of bytes on all ranks. Collective.
  void registerTensor(const at::Tensor& tensor, bool owning);
  // Ends the registration. Collective; returns when no peer writes any more. Drops signals that no
  // wait has taken.
  void deregister();

  // Writes `tensor`, of any strides, at element `offset` of the tensor that `destination` has
  // registered with the same dtype. After its end `tensor` may be reused. The destination learns of
  // the put by a signal.
  WorkPtr put(
      const at::Tensor& tensor, int64_t destination, int64_t offset, const Options& options);
  WorkPtr signal(int64_t peer, const Options& options);
  // Returns, or ends its Work, when the next signal of `peer` has arrived, and with it all that
  // `peer` put before the signal.
  WorkPtr waitSignal(int64_t peer, const Options& options);

  // Returns the tensor that `rank` has registered: its memory, not a copy. In shared memory it
  // stays valid for any length of time, also as the last reference to the memory; on an accelerator
  // until the tensor is deregistered.
  at::Tensor mapRemoteTensor(int64_t rank) const;

  // Raises unless `rank` exists.
  void checkRank(const char* what, const char* argument, int64_t rank) const;

  // Returns the tensor's description on this rank, or nullopt if no tensor is registered.
  std::optional<Part> part() const;
  // Returns this rank's tensor, or nullopt if none is registered or the window does not own it.
  std::optional<at::Tensor> tensor() const;

  // Makes the Work of a synchronous operation for a caller that needs one.
  WorkPtr finishedWork(OpKind kind) const { return comm_->finishedWork(kind, {}); }

  const at::Device& device() const { return comm_->device(); }

 private:
  struct Registration;

  // Returns whether registration maps the memory of all peers. It does on an accelerator, where a
  // put is a copy to that memory. Shared memory is mapped on request, and its library does the
  // puts.
  bool mapsPeers() const { return !device().is_cpu(); }
  std::shared_ptr<Registration> registered(const char* what) const;
  void refuseDeferral(const char* what) const;
  ncclResult_t exchange(
      Collective collective,
      const at::Tensor& input,
      const at::Tensor& output,
      ncclComm_t comm,
      cudaStream_t stream) const;
  ncclResult_t describeAll(Registration& registration, ncclComm_t comm, cudaStream_t stream) const;
  ncclResult_t mapAll(Registration& registration, ncclComm_t comm, cudaStream_t stream) const;
  void forget(std::shared_ptr<Registration> registration) noexcept;

  const std::shared_ptr<Communicator> comm_;
  mutable std::mutex mutex_;
  std::shared_ptr<Registration> registration_;  // null if none
};

}  // namespace torchcomms_pg
