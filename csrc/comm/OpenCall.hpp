// A thread's unfinished calls, for the handlers of signals, which run inside them.
#pragma once

#include <c10/util/ScopeExit.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace torchcomms_pg {

class Identity;
struct Group;
struct Operation;

// An unfinished call of this thread in a communicator, which may wait for other ranks. Python may
// run the handler of a signal in the main thread in the middle of such a call. The handler can then
// neither use the communicator, whose operations have an order, nor free what the call uses.
class OpenCall {
 public:
  // `op`: the operation that the call waits for, which must outlive this object; null if the call
  // waits for all operations in flight.
  OpenCall(const Identity& comm, const Operation* op);
  ~OpenCall();
  OpenCall(const OpenCall&) = delete;
  OpenCall& operator=(const OpenCall&) = delete;

  // While the result exists, handlers of signals run in the calling thread.
  [[nodiscard]] static auto handling() {
    return c10::make_scope_exit(
        [outer = std::exchange(handled_, innermost_)] { handled_ = outer; });
  }

  // Returns the outermost call in `comm` that a running handler has interrupted, or null.
  static OpenCall* around(const Identity& comm);

  // Raises RuntimeError if a handler runs in the middle of a call in `comm`. `what`: the function
  // that the handler calls.
  static void refuse(const Identity& comm, const char* what);

  // Raises the error of refuse(). `call`: the call of the group in whose middle the handler runs.
  [[noreturn]] static void refuseIn(
      const Group& group, int rank, const std::string& call, const char* what);

  // Calls `body` when this call has been left, after bodies that were added before. Drops the
  // exceptions of `body`, since the call itself raises the communicator's failure.
  void afterwards(std::function<void()> body) { afterwards_.push_back(std::move(body)); }

 private:
  static inline thread_local OpenCall* innermost_ = nullptr;
  // Innermost call that a running handler has interrupted, or null.
  static inline thread_local OpenCall* handled_ = nullptr;

  const Identity& comm_;
  const Operation* const op_;
  OpenCall* const outer_;
  std::vector<std::function<void()>> afterwards_;
};

}  // namespace torchcomms_pg
