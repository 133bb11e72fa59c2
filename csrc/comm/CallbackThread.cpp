#include "comm/CallbackThread.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <optional>
#include <utility>

#include "base/OutstandingTask.hpp"

namespace torchcomms_pg {

struct CallbackThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  struct Callback {
    OutstandingTask unfinished;
    std::function<void()> run;
  };
  std::deque<Callback> due;
  bool busy = false;
  bool stop = false;
};

CallbackThread::CallbackThread()
    : state_(std::make_shared<State>()), thread_([state = state_] { run(state); }) {
  pthread_setname_np(thread_.native_handle(), "tcpg_hooks");
}

CallbackThread::~CallbackThread() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // a callback held the last reference to this object's owner
  } else {
    thread_.join();
  }
}

void CallbackThread::add(std::function<void()> callback) {
  {
    std::lock_guard lock(state_->mutex);
    state_->due.push_back({{}, std::move(callback)});
  }
  state_->changed.notify_all();
}

void CallbackThread::drain() {
  if (thread_.get_id() == std::this_thread::get_id()) {
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->due.empty() && !state_->busy; });
}

void CallbackThread::run(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stop || !state->due.empty(); });
    if (state->due.empty()) {
      return;
    }
    std::optional<State::Callback> callback(std::move(state->due.front()));
    state->due.pop_front();
    state->busy = true;
    lock.unlock();
    try {
      callback->run();
    } catch (const std::exception& error) {
      TORCH_WARN("a completion hook raised: ", error.what());
    }
    callback.reset();  // its captures may take locks of their own when freed
    lock.lock();
    state->busy = false;
    state->changed.notify_all();
  }
}

}  // namespace torchcomms_pg
