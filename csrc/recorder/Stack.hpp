// Python's stack of a thread at the time it issued an operation.
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

using Stack = std::shared_ptr<const void>;  // null if none

// Source of stacks. The bindings implement it for Python, which this side does not depend on.
// torch::symbolize() cannot replace it: it imports torch._inductor, which takes seconds, in a
// process that has just failed.
class StackSource {
 public:
  virtual ~StackSource() = default;
  // Captures the stack of the calling thread.
  virtual Stack capture() = 0;
  // Describes stacks, the innermost frame of each first.
  virtual std::vector<std::vector<Frame>> describe(const std::vector<Stack>& stacks) = 0;

  // Returns whether a function in `stack` waits for the end of the operations that it issues, also
  // through calls: torch's recv() calls irecv().
  virtual bool waits(const Stack& stack) = 0;
  // Returns whether the thread was still in the call with stack `outer` when `inner` was captured.
  virtual bool within(const Stack& inner, const Stack& outer) = 0;
  // Returns whether the thread, given by its pthread_t, now has the stack `stack`, or a deeper one
  // that begins with it, as in a hook that was called there. Takes the GIL.
  virtual bool stands(uint64_t thread, const Stack& stack) = 0;

  // Sets the source, once, when the module is loaded; it is never freed. get() returns null before.
  static void set(StackSource* source) { source_ = source; }
  static StackSource* get() { return source_; }

 private:
  static inline StackSource* source_ = nullptr;
};

}  // namespace torchcomms_pg
