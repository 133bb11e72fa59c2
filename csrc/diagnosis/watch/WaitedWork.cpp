#include "diagnosis/watch/WaitedWork.hpp"

#include <algorithm>
#include <vector>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

struct Waiting {
  const c10d::Work* work;
  GroupActivity::Waiter waiter;
};
struct AllWaiting {
  Mutex mutex;
  std::vector<Waiting> all GUARDED_BY(mutex);  // one for each waiting thread: few
};
PerProcess<AllWaiting> waiting;

}  // namespace

WaitedWork::WaitedWork(const c10d::Work* work) : work_(work) {
  const GroupActivity::Waiter waiter{threadNumber(), Clock::now()};
  auto& known = waiting.get();
  LockGuard lock(known.mutex);
  known.all.push_back({work, waiter});
}

WaitedWork::~WaitedWork() {
  auto& known = waiting.get();
  LockGuard lock(known.mutex);
  // The last one, since a wait may run Python's handlers of signals, which wait themselves.
  const auto own = std::ranges::find_if(
      known.all.rbegin(), known.all.rend(),
      [&](const auto& each) { return each.work == work_ && each.waiter.thread == threadNumber(); });
  if (own != known.all.rend()) {
    known.all.erase(std::prev(own.base()));
  }
}

GroupActivity::Waiter WaitedWork::waiterFor(const c10d::Work* work) {
  auto& known = waiting.get();
  LockGuard lock(known.mutex);
  const auto found = std::ranges::find(known.all, work, &Waiting::work);
  return found == known.all.end() ? GroupActivity::Waiter{} : found->waiter;
}

}  // namespace torchcomms_pg
