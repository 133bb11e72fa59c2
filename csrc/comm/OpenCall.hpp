// Calls of a thread that are under way, for the handlers of signals, which run inside them.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace torchcomms_pg {

class Communicator;
struct Operation;

// A call of the calling thread in a communicator that may wait for other ranks. Python runs the
// handler of a signal in the main thread, also in the middle of such a call. The handler can then
// neither use the communicator, whose operations have an order, nor free what the call uses.
class OpenCall {
 public:
  // `op`: the operation that it waits for, which outlives this; null: for all that are in flight.
  OpenCall(Communicator& comm, const Operation* op);
  ~OpenCall();
  OpenCall(const OpenCall&) = delete;
  OpenCall& operator=(const OpenCall&) = delete;

  // Present while handlers run in the calling thread.
  class Handlers {
   public:
    Handlers();
    ~Handlers();
    Handlers(const Handlers&) = delete;
    Handlers& operator=(const Handlers&) = delete;

   private:
    OpenCall* const outer_;
  };

  // Returns the outermost call in `comm` in whose middle a handler runs; null: none does.
  static OpenCall* around(const Communicator& comm);

  // Raises RuntimeError if a handler runs in the middle of a call in `comm`. `what`: that which the
  // handler calls.
  static void refuse(const Communicator& comm, const char* what);

  // Has `body` called when this call has been left, after those before it. What it raises is
  // dropped: the call raises why the communicator has failed.
  void afterwards(std::function<void()> body) { afterwards_.push_back(std::move(body)); }

 private:
  Communicator& comm_;
  const Operation* const op_;
  OpenCall* const outer_;
  std::vector<std::function<void()>> afterwards_;
};

}  // namespace torchcomms_pg
