#include "monitor/SpareThread.hpp"

#include <condition_variable>
#include <deque>
#include <utility>

#include "base/Mutex.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

struct SpareThread::State {
  Mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> due GUARDED_BY(mutex);
  bool closing GUARDED_BY(mutex) = false;

  void run() {
    UniqueLock lock(mutex);
    for (;;) {
      changed.wait(lock, [&]() REQUIRES(mutex) { return closing || !due.empty(); });
      if (due.empty()) {
        return;
      }
      auto body = std::move(due.front());
      due.pop_front();
      lock.unlock();
      attempt(body);
      body = nullptr;  // its captures may take locks when they are destroyed
      lock.lock();
    }
  }
};

SpareThread::SpareThread() : state_(std::make_shared<State>()) {
  startDetached("tcpg_spare", "the monitor", [state = state_] { state->run(); });
}

SpareThread::~SpareThread() {
  LockGuard lock(state_->mutex);
  state_->closing = true;
  state_->changed.notify_all();
}

void SpareThread::run(std::function<void()> body) {
  LockGuard lock(state_->mutex);
  state_->due.push_back(std::move(body));
  state_->changed.notify_all();
}

}  // namespace torchcomms_pg
