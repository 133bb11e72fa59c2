// Where a thread was when it issued an operation.
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

// Whoever can tell stacks, which is Python: this side of the bindings knows
// nothing of it. torch's own torch::symbolize() is no help there, since it
// imports torch._inductor, for seconds and in a process that has just failed.
class StackSource {
 public:
  virtual ~StackSource() = default;
  // Of the calling thread.
  virtual Stack capture() = 0;
  // The innermost frame first.
  virtual std::vector<std::vector<Frame>> describe(const std::vector<Stack>& stacks) = 0;

  // Set once, when the module is loaded, and never freed; null: there is none.
  static void set(StackSource* source) { source_ = source; }
  static StackSource* get() { return source_; }

 private:
  static inline StackSource* source_ = nullptr;
};

}  // namespace torchcomms_pg
