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
// Communicators of libnccl are blocking. A nonblocking communicator starts a thread for each
// operation (NCCL's src/group.cc, groupLaunchNonBlocking), lets only one thread at a time ask for
// its state, and stays failed after a wrong argument. If a call in an existing communicator blocks,
// an abort from another thread ends the call. Thread-safe.
class BlockingCall {
 public:
  using Body = std::function<ncclResult_t(ncclComm_t* made)>;

  // Starts a thread that calls `body` with `device` as the current device. `body` owns what it
  // uses, since the call may outlive this object and its owner. Raises std::runtime_error if no
  // thread can be started.
  BlockingCall(const Library& api, c10::Device device, Body body);
  ~BlockingCall() { leave(); }
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;

  // Waits for the end of the call. Returns false if `deadline` passes first.
  bool waitUntil(Clock::time_point deadline) const;
  bool done() const;

  // Return the result and the error of a call that is done.
  ncclResult_t result() const;
  std::string text() const;  // text of the library or of an exception; empty without an error

  // Returns the communicator that a successful call has made, for the caller to own. Returns null
  // before the call's end, after an error, and after an earlier take() or leave().
  ncclComm_t take();

  // Aborts the communicator that the call has made or will make, unless it was taken. Does not wait
  // for the call to end.
  void leave();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchcomms_pg
