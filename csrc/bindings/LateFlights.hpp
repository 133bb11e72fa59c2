// Asynchronous operations that run on copies, from their issue until the program learns of their
// end.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/Mutex.hpp"

namespace torchcomms_pg {

// Hides this thread's operators from the check, from modes and subclasses, and from autograd.
class Unseen {
 public:
  Unseen()
      : guard_(
            c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
            c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python)) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

// Returns whether a tensor is on the CPU, and has bytes that its strides describe.
bool hasBytes(const at::Tensor& tensor);

// Fills a tensor with NaN, or with a value that is unlikely for its type.
void poison(const at::Tensor& tensor);
// Returns whether a tensor holds what `poison` has put into it.
bool isPoison(const at::Tensor& tensor);
// Returns whether two tensors of one shape and dtype are equal bit by bit.
bool sameBytes(const at::Tensor& one, const at::Tensor& other);

// The bytes of one tensor, which keep no memory alive.
class Span {
 public:
  explicit Span(const at::Tensor& tensor);

  // Address of the first byte, and the address behind the last one.
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }
  // Returns whether the memory has been freed, by the storage's end or by a resize.
  bool freed() const;
  bool sharesBytes(const Span& other) const;
  // Returns a tensor of these bytes; undefined if they have been freed.
  at::Tensor tensor() const;

 private:
  at::Tensor bytesIn(const at::Tensor& memory, uint64_t low) const;

  uint64_t begin_, end_;
  bool dense_;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
  int64_t offset_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

// One operation whose end the program does not know yet. Keeps no tensor alive.
struct LateFlight {
  LateFlight(
      c10::SafePyObject issued, const std::vector<at::Tensor>& written,
      const std::vector<at::Tensor>& read, bool fromCompiledCode);

  // Returns whether the memory of all outputs has been freed; of all inputs, if the operation has
  // no outputs.
  bool gone() const;

  const c10::SafePyObject issue;     // an object of Python, whose report() takes findings
  std::vector<Span> outputs;         // the bytes that it writes
  std::vector<Span> inputs;          // bytes that it only reads
  const bool compiled;               // whether compiled code has issued it
  pid_t process;                     // who issued it
  std::atomic<bool> touched{false};  // whether an operator has written into its tensors
};

// The flights of this process.
namespace flights {

void add(std::shared_ptr<LateFlight> flight);
// Returns false if the flight has ended before.
bool end(const LateFlight& flight);
// Forgets all flights, also in a forked child.
void forget();
// Returns whether there may be flights; as fast as a read of a variable.
bool any();
// Returns whether a tensor's bytes lie between the first and the last one of a flight's tensor.
bool concern(const at::Tensor& tensor);
bool concern(const std::vector<at::Tensor>& tensors);
std::vector<std::shared_ptr<LateFlight>> all();
// Removes the flights that are gone, and reports those that compiled code has issued.
void sweep();

}  // namespace flights

// Hands an operation's results over when the program learns of its end. Thread-safe. No method
// waits for the GIL while it holds the mutex.
class Delivery {
 public:
  // The operation writes `results`, copies of `outputs`. `copies` is what was in `inputs` at the
  // issue. Adds the flight.
  Delivery(
      std::shared_ptr<LateFlight> flight, std::vector<at::Tensor> outputs,
      std::vector<at::Tensor> results, std::vector<at::Tensor> inputs,
      std::vector<at::Tensor> copies);

  const std::shared_ptr<LateFlight>& flight() const { return flight_; }

  // Counts a call of wait().
  void awaited();
  // Hands the results over, if the operation has ended well, and ends the flight. If a `future`
  // calls, the flight goes on if the program learns of the end only by calls of futures.
  void ended(bool ok, bool future = false);
  // Hands over the result that a functional collective has returned, and ends the flight.
  void endWith(at::Tensor result);
  // Notes that Python has got a future, whose calls tell of the end.
  void futureTaken();
  // Notes that the future is in the hands of C++, which waits for it by itself.
  void futurePassedOn();
  // Releases the inputs, as a dropped work does: futures keep no input.
  void workDropped();

 private:
  struct Finding {
    const char* kind;
    const char* what;
  };
  struct Kept {
    std::vector<at::Tensor> outputs, results, inputs, copies;
  };

  std::vector<Finding> deliver() REQUIRES(mutex_);
  std::vector<Finding> checkInputs() REQUIRES(mutex_);

  const std::shared_ptr<LateFlight> flight_;
  Mutex mutex_;
  // A work keeps the tensors themselves until its end. So do not spans: they see memory freed.
  Kept kept_ GUARDED_BY(mutex_);
  bool delivered_ GUARDED_BY(mutex_) = false;
  bool told_ GUARDED_BY(mutex_) = false;
  int futures_ GUARDED_BY(mutex_) = 0;
  std::atomic<int> waits_{0};
};

}  // namespace torchcomms_pg
