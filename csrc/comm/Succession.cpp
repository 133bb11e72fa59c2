// How one communicator takes the place of another.
#include <mutex>

#include "comm/Communicator.hpp"
#include "comm/Recording.hpp"

namespace torchcomms_pg {

void Communicator::succeed(const Communicator& former) {
  // The same object: whoever has added a hook removes it there.
  hooks_ = former.hooks_;
  setEndsProcess(former.endsProcess());
  setBlockingWait(former.blockingWait_.load(std::memory_order_relaxed));
  if (const auto recorders = std::atomic_load(&former.recorders_)) {
    for (const auto& recorded : *recorders) {
      record(recorded.recorder);
    }
  }
}

void Communicator::awaitRanks(Milliseconds timeout) {
  // In the list of operations in flight, so that the monitor sees it.
  Operation op;
  op.kind = OpKind::initialization;
  op.issued = Clock::now();
  op.timeout = timeout;
  const auto entry = enter(op, nullptr);
  try {
    awaitInitialization();
  } catch (...) {
    leave(entry);
    throw;
  }
  leave(entry);
}

void Communicator::retire(const char* why) {
  giveUp(why);
  closeNow();
}

}  // namespace torchcomms_pg
