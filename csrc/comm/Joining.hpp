// Whether operations can be issued: all ranks have joined, and the communicator has not ended.
#pragma once

#include <nccl.h>

#include "operation/Operation.hpp"

namespace torchcomms_pg {

class CommHandle;
class FailureState;
class Identity;
class InFlightOps;

// Waits for the ranks of one communicator. Thread-safe.
class Joining {
 public:
  Joining(
      const Identity& self, CommHandle& library, InFlightOps& inFlight, FailureState& failureState)
      : self_(self), library_(library), inFlight_(inFlight), failureState_(failureState) {}

  // Returns CommHandle::get(). Raises if no operation can be issued any more.
  ncclComm_t usable() const;
  // Returns whether every rank has joined. If some rank has not, and joining or the communicator
  // has failed, raises that failure. `op`: the operation that needs the ranks.
  bool initialized(const Operation& op = initialization());
  // Waits until every rank has joined. Raises the errors of initialized(), and the exception of a
  // signal's handler.
  void awaitInitialization(const Operation& op = initialization());
  // Does the same for at most `timeout`, which the monitor watches like an operation's timeout.
  // Raises CommError if some rank has not joined by then.
  void awaitRanks(Milliseconds timeout);
  // Waits until every rank has joined. Returns the library's communicator, which a CommHandle owns.
  ncclComm_t handle();

 private:
  // Makes the operation that stands for the joining of the ranks.
  static Operation initialization() { return {.kind = OpKind::initialization}; }

  const Identity& self_;
  CommHandle& library_;
  InFlightOps& inFlight_;
  FailureState& failureState_;
};

}  // namespace torchcomms_pg
