// Memory of every rank that its peers write to by themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/Communicator.hpp"

namespace torchcomms_pg {

// The ranks of one communicator register one tensor each, of any sizes and
// dtypes, and then put into each other's. Signals count, for each window and
// ordered pair of ranks apart: a wait takes one. A signal follows all puts that
// its rank has issued on the window before, whatever was asynchronous.
//
// Thread-safe. Outside of batches only: an operation may wait for a put before
// it, which a batch would hold back.
class Window final {
 public:
  using Options = Communicator::Options;

  // What a rank has registered.
  struct Part {
    c10::ScalarType dtype;
    std::vector<int64_t> sizes;
    int64_t numel;
  };

  explicit Window(std::shared_ptr<Communicator> comm);
  // Of a registered window: frees what is here; its peers keep theirs.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Collective. Moves the storage of `tensor`, which is contiguous, into shared
  // memory (see moveToShared): peers write into this very tensor. With
  // `owning` the window keeps the tensor.
  void registerTensor(const at::Tensor& tensor, bool owning);
  // Collective; returns when no peer writes any more. Signals that were not
  // waited for are dropped.
  void deregister();

  // Writes `tensor`, of any strides, at element `offset` of what `destination`
  // has registered, with the same dtype. When it has ended, `tensor` may be
  // reused; a signal tells the destination.
  WorkPtr put(
      const at::Tensor& tensor, int64_t destination, int64_t offset, const Options& options);
  WorkPtr signal(int64_t peer, const Options& options);
  // Returns, or its Work ends, when the next signal of `peer` is there, and
  // with it what `peer` had put before.
  WorkPtr waitSignal(int64_t peer, const Options& options);

  // The tensor that `rank` has registered: its memory, not a copy. It may be
  // used for any length of time, also when nobody else knows the memory.
  at::Tensor mapRemoteTensor(int64_t rank) const;

  // Raises unless `rank` exists.
  void checkRank(const char* what, const char* argument, int64_t rank) const;

  // Of this rank; none when nothing is registered.
  std::optional<Part> part() const;
  std::optional<at::Tensor> tensor() const;  // none also unless owned

  // The Work of a synchronous operation, for callers that want one.
  WorkPtr finishedWork(OpKind kind) const { return comm_->finishedWork(kind, {}); }

 private:
  struct Registration;

  std::shared_ptr<Registration> registered(const char* what) const;
  void refuseBatch(const char* what) const;
  void forget(Registration& registration) noexcept;
  int takeSignal();
  void giveSignal(int index);

  const std::shared_ptr<Communicator> comm_;
  mutable std::mutex mutex_;
  std::shared_ptr<Registration> registration_;  // null: none
};

}  // namespace torchcomms_pg
