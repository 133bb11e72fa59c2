#include "operation/Checks.hpp"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

namespace torchcomms_pg {

std::ostream& operator<<(std::ostream& out, const Argument& argument) {
  out << argument.what << ": " << argument.name;
  return argument.index < 0 ? out : out << '[' << argument.index << ']';
}

void checkDense(const Argument& argument, const at::Tensor& tensor, const at::Device& device) {
  TORCH_CHECK_VALUE(tensor.defined(), argument, " is an undefined tensor");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, argument, " has layout ", tensor.layout(),
      ", wanted a dense tensor; convert it with to_dense()");
  TORCH_CHECK_VALUE(
      tensor.device() == device, argument, " is on ", tensor.device(), ", wanted ", device,
      "; move it with tensor.to('", device, "')");
  if (tensor.numel() == 0) {
    return;
  }
  size_t reach = static_cast<size_t>(tensor.storage_offset()) + 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    reach += static_cast<size_t>((tensor.size(i) - 1) * tensor.stride(i));
  }
  TORCH_CHECK_VALUE(
      reach * tensor.element_size() <= tensor.storage().nbytes(), argument, " (shape ",
      tensor.sizes(), ") needs ", reach * tensor.element_size(),
      " bytes of its storage, which has been resized to ", tensor.storage().nbytes(),
      "; give it its memory back with untyped_storage().resize_() first");
}

void checkTensor(const Argument& argument, const at::Tensor& tensor, const at::Device& device) {
  checkDense(argument, tensor, device);
  TORCH_CHECK_VALUE(
      !tensor.is_conj() && !tensor.is_neg(), argument,
      tensor.is_conj() ? " is a conjugate" : " is negative",
      " by a flag alone, as conj() makes; pass tensor.resolve_conj().resolve_neg()");
}

void checkWritable(const Argument& argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes, argument, " (shape ", tensor.sizes(),
      ", strides ", tensor.strides(),
      ") has elements that overlap in memory, as expand() makes; pass tensor.clone()");
}

void checkWritable(const Argument& argument, const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkWritable(argument[i], tensors[i]);
  }
}

void checkOutput(const Argument& argument, const at::Tensor& tensor, const at::Device& device) {
  checkTensor(argument, tensor, device);
  checkWritable(argument, tensor);
}

void checkTensors(
    const Argument& argument, const std::vector<at::Tensor>& tensors, const at::Tensor& like,
    const at::Device& device) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkTensor(argument[i], tensors[i], device);
    TORCH_CHECK_TYPE(
        tensors[i].scalar_type() == like.scalar_type(), argument[i], " has dtype ",
        tensors[i].scalar_type(), ", the other tensors have ", like.scalar_type(),
        "; all tensors of one call must share a dtype");
  }
}

void checkSameType(
    const Argument& argument, const at::Tensor& tensor, const char* otherArgument,
    const at::Tensor& other) {
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == other.scalar_type(), argument, " has dtype ", tensor.scalar_type(),
      ", ", otherArgument, " has ", other.scalar_type(), "; they must be the same");
}

void checkPair(
    const char* what, const at::Tensor& output, const at::Tensor& input, const at::Device& device) {
  checkOutput({what, "output"}, output, device);
  checkTensor({what, "input"}, input, device);
  checkSameType({what, "output"}, output, "input", input);
}

void checkNumel(const Argument& argument, const at::Tensor& tensor, int64_t numel) {
  TORCH_CHECK_VALUE(
      tensor.numel() == numel, argument, " has ", tensor.numel(), " elements (shape ",
      tensor.sizes(), "), wanted ", numel);
}

void checkSelfMessages(
    int rank, const std::vector<Elements>& sent, const std::vector<Elements>& received) {
  TORCH_CHECK_VALUE(
      sent.size() == received.size(), "batch: rank ", rank, " sends ", sent.size(),
      " messages to itself and receives ", received.size(), ", wanted as many; nothing was sent");
  for (size_t i = 0; i < sent.size(); ++i) {
    TORCH_CHECK_VALUE(
        sent[i].numel == received[i].numel && sent[i].dtype == received[i].dtype, "batch: rank ",
        rank, " sends ", sent[i].numel, " x ", sent[i].dtype, " to itself and receives ",
        received[i].numel, " x ", received[i].dtype, ", wanted the same; nothing was sent");
  }
}

void checkRank(const Argument& argument, int64_t rank, int size) {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < size, argument, " ", rank, " is not a rank of this group, wanted 0 to ",
      size - 1);
}

void checkRootList(
    const Argument& argument, const std::vector<at::Tensor>& tensors, const at::Tensor& like,
    int root, int rank, int size, const at::Device& device) {
  if (rank != root) {
    TORCH_CHECK_VALUE(
        tensors.empty(), argument, " has ", tensors.size(), " tensors on rank ", rank,
        ", which is not the root; wanted none");
    return;
  }
  checkListLength(argument, tensors.size(), size);
  checkTensors(argument, tensors, like, device);
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkNumel(argument[i], tensors[i], like.numel());
  }
}

void checkListLength(const Argument& argument, size_t length, size_t wanted) {
  TORCH_CHECK_VALUE(
      length == wanted, argument, " has ", length, " tensors, wanted ", wanted,
      wanted > 1 ? " (one for each rank)" : "");
}

}  // namespace torchcomms_pg
