#include "diagnosis/lateness/AwaitedEnd.hpp"

#include <utility>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"

namespace torchcomms_pg {

namespace {

// The list of the objects without a thread.
struct SpareEnds {
  Mutex mutex;
  AwaitedEnd* first GUARDED_BY(mutex) = nullptr;
};
PerProcess<SpareEnds> spareEnds;

}  // namespace

// Takes an object for the thread's lifetime. Gives it back at the thread's end.
struct AwaitedEnd::Owner {
  AwaitedEnd* end = nullptr;

  Owner() {
    auto& spare = spareEnds.get();
    LockGuard lock(spare.mutex);
    end = spare.first == nullptr ? new AwaitedEnd() : spare.first;
    spare.first = std::exchange(end->next_, nullptr);
  }
  ~Owner() {
    auto& spare = spareEnds.get();
    LockGuard lock(spare.mutex);
    end->next_ = std::exchange(spare.first, end);
  }
};

AwaitedEnd& AwaitedEnd::ofThread() {
  static thread_local Owner owner;
  return *owner.end;
}

}  // namespace torchcomms_pg
