// A call of libnccl that may block for long, in a separate thread.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

#include "nccl/Library.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

// Runs the calls that make or end a communicator of libnccl, so that a caller can give up waiting.
// Communicators of libnccl are blocking: a nonblocking one starts a thread for each operation
// (NCCL's src/group.cc, groupLaunchNonBlocking), may be asked for its state by one thread at a
// time, and keeps a wrong argument as a failure for good. An abort from another thread ends a
// blocked call of a communicator that exists. Thread-safe.
class BlockingCall {
 public:
  using Body = std::function<ncclResult_t(ncclComm_t* made)>;

  // Starts `body` on `device`. `body` may outlive this object and everything else of the caller.
  // Raises std::runtime_error if no thread can be started.
  BlockingCall(const Library& api, c10::Device device, Body body);
  ~BlockingCall() { leave(); }
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;

  // Waits for the end of the call. Returns false if `deadline` passes first.
  bool waitUntil(Clock::time_point deadline) const;
  bool done() const;

  // Return the result and the error of a call that is done.
  ncclResult_t result() const;
  std::string text() const;  // the library's or the exception's; empty without an error

  // Takes the communicator that a successful call has made. Returns null if it has been taken or
  // left.
  ncclComm_t take();

  // Aborts the communicator that the call has made or will make, unless it is taken. Does not wait.
  void leave();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchcomms_pg
