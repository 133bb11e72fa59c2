// Memory of every rank that its peers write to by themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg {

// A window: the ranks of one communicator register one tensor each, of any sizes and dtypes, and
// then put into each other's. Signals count, for each window and ordered pair of ranks apart: a
// wait takes one. A signal follows all puts that its rank has issued on the window before,
// asynchronous or not.
//
// On an accelerator a put is a copy of the device into the peer's memory, which the library maps,
// because NCCL's own put takes registered memory alone and always signals; signals are the
// library's.
//
// Batches refuse its operations: one may wait for a put before it, which a batch would hold back.
// So do graphs: a signal counts once, not with each replay. Thread-safe.
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
  // Makes a window. Collective. Raises NotImplementedError where windows are not supported.
  static std::shared_ptr<Window> make(const std::shared_ptr<Communicator>& comm);
  explicit Window(std::shared_ptr<Communicator> comm);  // see make()
  // Frees what this rank has of a registered window; its peers keep theirs.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Registers `tensor`, which is contiguous: moves its storage into shared memory (see
  // moveToShared), so that peers write into this very tensor. With `owning` the window keeps the
  // tensor. NCCL wants as many bytes of all ranks. Collective.
  void registerTensor(const at::Tensor& tensor, bool owning);
  // Ends the registration. Collective; returns when no peer writes any more. Drops signals that
  // were not waited for.
  void deregister();

  // Writes `tensor`, of any strides, at element `offset` of what `destination`
  // has registered, with the same dtype. When it has ended, `tensor` may be
  // reused; a signal tells the destination.
  WorkPtr put(
      const at::Tensor& tensor, int64_t destination, int64_t offset, const Options& options);
  WorkPtr signal(int64_t peer, const Options& options);
  // Returns, or its Work ends, when the next signal of `peer` is there, and with it everything that
  // `peer` had put before.
  WorkPtr waitSignal(int64_t peer, const Options& options);

  // Returns the tensor that `rank` has registered: its memory, not a copy. In shared memory it may
  // be used for any length of time, also when it is the last reference to the memory; on an
  // accelerator until the tensor is deregistered.
  at::Tensor mapRemoteTensor(int64_t rank) const;

  // Raises unless `rank` exists.
  void checkRank(const char* what, const char* argument, int64_t rank) const;

  // Returns this rank's part; none when nothing is registered.
  std::optional<Part> part() const;
  std::optional<at::Tensor> tensor() const;  // this rank's; none also unless owned

  // Makes the Work of a synchronous operation, for callers that want one.
  WorkPtr finishedWork(OpKind kind) const { return comm_->finishedWork(kind, {}); }

  const at::Device& device() const { return comm_->device(); }

 private:
  struct Registration;

  // Returns whether the memory of all peers is mapped when a tensor is registered, as on an
  // accelerator, where a put is a copy to it. Shared memory is mapped when asked for, and its
  // library puts.
  bool mapsPeers() const { return !device().is_cpu(); }
  std::shared_ptr<Registration> registered(const char* what) const;
  void refuseDeferral(const char* what) const;
  ncclResult_t exchange(
      const at::Tensor& input,
      const at::Tensor& output,
      ncclComm_t comm,
      const std::function<ncclResult_t(const void* in, void* out)>& body) const;
  ncclResult_t describeAll(Registration& registration, ncclComm_t comm, cudaStream_t stream) const;
  ncclResult_t mapAll(Registration& registration, ncclComm_t comm, cudaStream_t stream) const;
  void forget(std::shared_ptr<Registration> registration) noexcept;

  const std::shared_ptr<Communicator> comm_;
  mutable std::mutex mutex_;
  std::shared_ptr<Registration> registration_;  // null: none
};

}  // namespace torchcomms_pg
