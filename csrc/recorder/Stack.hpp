// Python's stack of a thread when it issued an operation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torchcomms_pg {

struct Frame {
  std::string name;
  std::string file;
  int64_t line = 0;
};

using Stack = std::shared_ptr<const void>;  // null: none

// Source of stacks, which is Python: this side of the bindings knows nothing of it. torch's own
// torch::symbolize() is no help there, since it imports torch._inductor, for seconds and in a
// process that has just failed.
class StackSource {
 public:
  virtual ~StackSource() = default;
  // Captures the stack of the calling thread.
  virtual Stack capture() = 0;
  // Describes stacks, the innermost frame of each first.
  virtual std::vector<std::vector<Frame>> describe(const std::vector<Stack>& stacks) = 0;

  // Returns whether a function that has called for `stack` waits for the end of what it issues,
  // itself or by others: torch's recv() calls irecv().
  virtual bool waits(const Stack& stack) = 0;
  // Returns whether the thread was still in the call of `outer` when it came to `inner`.
  virtual bool within(const Stack& inner, const Stack& outer) = 0;
  // Returns whether the thread, by its pthread_t, is where `stack` was captured. Takes the GIL.
  virtual bool stands(uint64_t thread, const Stack& stack) = 0;

  // Sets the source, once, when the module is loaded; it is never freed. Null: there is none.
  static void set(StackSource* source) { source_ = source; }
  static StackSource* get() { return source_; }

 private:
  static inline StackSource* source_ = nullptr;
};

}  // namespace torchcomms_pg
