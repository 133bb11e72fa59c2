#include "comm/Joining.hpp"

#include <c10/util/ScopeExit.h>

#include <thread>

#include "comm/FailureState.hpp"
#include "comm/Identity.hpp"
#include "comm/InFlightOps.hpp"
#include "comm/OpenCall.hpp"
#include "handle/CommHandle.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::microseconds kJoinPoll{200};

}  // namespace

ncclComm_t Joining::usable() const {
  library_.process().check(self_.group().name);
  if (const auto failure = failureState_.get()) {
    failureState_.raise(*failure);
  }
  auto* const comm = library_.get();
  TORCH_CHECK(
      (comm != nullptr || !library_.ready()) && !library_.closed(), "group '", self_.group().name,
      "' has been shut down; create a new one");
  return comm;
}

bool Joining::initialized(const Operation& op) {
  if (C10_LIKELY(library_.ready())) {
    return true;
  }
  usable();  // raises a failure that the monitor has found, such as a missed deadline
  const auto result = library_.join();
  if (result != ncclSuccess && result != ncclInProgress) {
    std::rethrow_exception(failureState_.error(op, result));
  }
  return result == ncclSuccess;
}

void Joining::awaitInitialization(const Operation& op) {
  if (initialized(op)) {
    return;
  }
  const OpenCall open(self_, &op);
  for (auto next = Clock::now() + kInterruptInterval; !initialized(op);) {
    std::this_thread::sleep_for(kJoinPoll);
    if (Clock::now() >= next) {
      next = Clock::now() + kInterruptInterval;
      if (const auto raised = failureState_.interruption()) {
        std::rethrow_exception(raised);
      }
    }
  }
}

void Joining::awaitRanks(Milliseconds timeout) {
  // Adds an operation in flight, so that the monitor watches its deadline.
  auto op = initialization();
  op.issued = Clock::now();
  op.timeout = timeout;
  const auto entry = inFlight_.add(op);
  const auto removal = c10::make_scope_exit([&] { inFlight_.remove(entry); });
  awaitInitialization(op);
}

ncclComm_t Joining::handle() {
  awaitInitialization();
  return usable();
}

}  // namespace torchcomms_pg
