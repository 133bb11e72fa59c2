// Checks of arguments. Called before anything is enqueued. The error of a failed check names the
// operation, the argument, the value passed and the value wanted.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <ostream>
#include <vector>

namespace torchcomms_pg {

// An argument, or an element of a list argument. Prints as e.g. "all_gather: tensor_list[2]".
struct Argument {
  const char* what;  // name of the operation
  const char* name;
  int64_t index = -1;  // place in the list; -1 if not an element

  Argument operator[](int64_t element) const { return {what, name, element}; }
};
std::ostream& operator<<(std::ostream& out, const Argument& argument);

// Checks that `tensor` is defined, strided and on `device`, and that its storage holds its
// elements.
void checkDense(const Argument& argument, const at::Tensor& tensor, const at::Device& device);

// Checks that `tensor` passes checkDense() and has neither the conjugate nor the negative bit: its
// memory holds the elements themselves.
void checkTensor(const Argument& argument, const at::Tensor& tensor, const at::Device& device);

// Checks that no two elements of the output `tensor` share memory, as elements of an expanded
// tensor do.
void checkWritable(const Argument& argument, const at::Tensor& tensor);
void checkWritable(const Argument& argument, const std::vector<at::Tensor>& tensors);

// Checks that `tensor` passes checkTensor() and checkWritable().
void checkOutput(const Argument& argument, const at::Tensor& tensor, const at::Device& device);

// Checks that all of `tensors` pass checkTensor() and have the dtype of `like`.
void checkTensors(
    const Argument& argument, const std::vector<at::Tensor>& tensors, const at::Tensor& like,
    const at::Device& device);

void checkSameType(
    const Argument& argument, const at::Tensor& tensor, const char* otherArgument,
    const at::Tensor& other);

// Checks the arguments "output" and "input" of `what`, of one dtype.
void checkPair(
    const char* what, const at::Tensor& output, const at::Tensor& input, const at::Device& device);

void checkNumel(const Argument& argument, const at::Tensor& tensor, int64_t numel);

// The elements of a message.
struct Elements {
  int64_t numel;
  at::ScalarType dtype;
};

// Checks the messages of a rank to itself in a batch: the first receive takes the first send, and
// so on. NCCL compares neither their numbers of elements nor their dtypes.
void checkSelfMessages(
    int rank, const std::vector<Elements>& sent, const std::vector<Elements>& received);

// Checks that `rank` is a rank of the group.
void checkRank(const Argument& argument, int64_t rank, int size);

// Checks that the root alone passes `tensors`: one for each rank, with the dtype and the number of
// elements of `like`.
void checkRootList(
    const Argument& argument, const std::vector<at::Tensor>& tensors, const at::Tensor& like,
    int root, int rank, int size, const at::Device& device);

void checkListLength(const Argument& argument, size_t length, size_t wanted);

}  // namespace torchcomms_pg
