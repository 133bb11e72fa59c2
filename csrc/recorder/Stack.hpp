// Python's stack of a thread at the time when the thread issued an operation.
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
  int64_t instruction = 0;  // offset in the function's bytecode
  int64_t firstLine = 0;    // of the function
};

using Stack = std::shared_ptr<const void>;  // null if the thread had no Python stack

// Source of stacks. The bindings implement it, so that the recorder does not depend on Python.
// torch::symbolize() cannot replace it: this function imports torch._inductor, which takes seconds,
// in a process that has just failed.
class StackSource {
 public:
  virtual ~StackSource() = default;
  // Captures the stack of the calling thread; null if the thread runs no Python. Takes the GIL.
  virtual Stack capture() = 0;
  // Returns the frames of each stack, the innermost frame first. Takes the GIL.
  virtual std::vector<std::vector<Frame>> describe(const std::vector<Stack>& stacks) = 0;

  // Returns where Python's threads are now, one line each; none if Python does not answer within
  // some seconds.
  virtual std::vector<std::string> threads() = 0;

  // Returns whether a function in `stack` waits for the end of operations that it issues itself or
  // through calls. For example, torch's recv() waits for the operation of irecv().
  virtual bool waits(const Stack& stack) = 0;
  // Returns whether `inner` was captured inside the call in which the thread captured `outer`. Also
  // true if unknown.
  virtual bool within(const Stack& inner, const Stack& outer) = 0;
  // Returns whether the stack of `thread`, a pthread_t, now begins with all of `stack`. The
  // thread's stack is deeper while a hook runs, for example. Also true if unknown. Takes the GIL.
  virtual bool stands(uint64_t thread, const Stack& stack) = 0;

  // Sets the source, once, when the module is loaded; the source is never freed. Until then, get()
  // returns null.
  static void set(StackSource* source) { source_ = source; }
  static StackSource* get() { return source_; }

 private:
  static inline StackSource* source_ = nullptr;
};

}  // namespace torchcomms_pg
