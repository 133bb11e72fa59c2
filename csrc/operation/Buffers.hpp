// Contiguous memory for tensors of any strides.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "operation/Types.hpp"

namespace torchcomms_pg {

// Lets this thread write to `tensor` even if the tensor was made in inference mode. That mode may
// be on only in the caller's thread.
class WritePermission {
 public:
  explicit WritePermission(const at::Tensor& tensor) {
    if (tensor.is_inference()) {
      guard_.emplace();
    }
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard_;
};

// An output tensor, and the memory that the library writes to: the tensor's own if it is
// contiguous, otherwise a buffer, which copyBack() copies to the tensor.
class OutputBuffer {
 public:
  explicit OutputBuffer(const at::Tensor& tensor)
      : tensor_(tensor),
        buffer_(
            tensor.is_contiguous() ? tensor
                                   : at::empty_like(tensor, at::MemoryFormat::Contiguous)) {}

  void* data() const { return buffer_.data_ptr(); }
  const at::Tensor& tensor() const { return tensor_; }
  const at::Tensor& buffer() const { return buffer_; }
  bool needsCopy() const { return !buffer_.is_same(tensor_); }
  void copyBack() const {
    if (needsCopy()) {
      const WritePermission permission(tensor_);
      tensor_.copy_(buffer_);
    }
  }

 private:
  at::Tensor tensor_;
  at::Tensor buffer_;
};

// Returns whether the tensors lie one after another in memory, as the chunks of a tensor do. Takes
// at least one tensor.
inline bool adjacent(const std::vector<at::Tensor>& tensors) {
  const auto* next = static_cast<const char*>(tensors.front().data_ptr());
  for (const auto& tensor : tensors) {
    if (!tensor.is_contiguous() || tensor.data_ptr() != next ||
        !tensor.storage().is_alias_of(tensors.front().storage())) {
      return false;
    }
    next += tensor.nbytes();
  }
  return true;
}

inline int64_t totalNumel(const std::vector<at::Tensor>& tensors) {
  int64_t total = 0;
  for (const auto& tensor : tensors) {
    total += tensor.numel();
  }
  return total;
}

// Output tensors of equal size, and the contiguous memory that the library writes to: their own if
// they are adjacent, otherwise a buffer, which copyBack() copies to them.
class OutputBuffers {
 public:
  explicit OutputBuffers(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {
    if (adjacent(tensors_)) {
      data_ = tensors_.front().data_ptr();
      return;
    }
    buffer_ = at::empty(
        {static_cast<int64_t>(tensors_.size()), tensors_.front().numel()},
        tensors_.front().options());
    data_ = buffer_.data_ptr();
  }

  void* data() const { return data_; }
  bool needsCopy() const { return buffer_.defined(); }
  void copyBack() const {
    for (size_t i = 0; needsCopy() && i < tensors_.size(); ++i) {
      const WritePermission permission(tensors_[i]);
      tensors_[i].copy_(buffer_[static_cast<int64_t>(i)].view_as(tensors_[i]));
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor buffer_;
  void* data_ = nullptr;
};

inline bool sameNumel(const std::vector<at::Tensor>& tensors) {
  return std::ranges::all_of(
      tensors, [&](const auto& tensor) { return tensor.numel() == tensors.front().numel(); });
}

}  // namespace torchcomms_pg
