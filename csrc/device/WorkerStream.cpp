#include "device/WorkerStream.hpp"

#include <unistd.h>

#include <cstdint>
#include <optional>
#include <system_error>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

struct WorkerStream::State : std::enable_shared_from_this<State> {
  explicit State(std::string threadName) : name(std::move(threadName)) {}

  struct Task {
    ExitGuard unfinished;
    std::function<void()> run;
  };

  const std::string name;
  const pid_t pid = getpid();
  Mutex mutex;
  std::condition_variable work;   // a task needs a leader, or the stream closes
  std::condition_variable ended;  // a thread has ended, or no task is left
  std::deque<Task> tasks GUARDED_BY(mutex);
  std::vector<std::thread> threads GUARDED_BY(mutex);
  size_t idle GUARDED_BY(mutex) = 0;     // threads that wait for tasks
  size_t running GUARDED_BY(mutex) = 0;  // threads that have not ended
  uint64_t lead GUARDED_BY(mutex) = 0;   // changes when a thread takes or hands over the lead
  bool led GUARDED_BY(mutex) = false;
  std::thread::id leader GUARDED_BY(mutex);
  bool closing GUARDED_BY(mutex) = false;
  std::atomic<bool> deferring{false};  // true from defer() to wake(); set with `mutex` held

  // Wakes or starts a thread. If no thread can be started, a running thread takes the tasks after
  // its current task; raises if no thread runs.
  void wakeOne() REQUIRES(mutex) {
    if (idle > 0) {
      work.notify_one();
      return;
    }
    try {
      threads.reserve(threads.size() + 1);
      threads.push_back(startThread(name.c_str(), [self = shared_from_this()] { self->run(); }));
    } catch (const std::exception& error) {
      if (running == 0) {
        raiseNoThread(name, error.what());
      }
      return;
    }
    ++running;
    ++idle;  // counted now, so that the next task starts no further thread
  }

  // Takes the lead. Runs tasks until none is left, `done` returns true or a task gives up the lead.
  void leadUntil(const std::function<bool()>* done) REQUIRES(mutex) {
    led = true;
    leader = std::this_thread::get_id();
    const uint64_t mine = ++lead;
    while (!tasks.empty()) {
      std::optional<Task> task(std::move(tasks.front()));
      tasks.pop_front();
      {
        const Unlocked unlocked(mutex);
        task->run();
        task.reset();  // without the lock: destructors of its captures may take locks
      }
      if (lead != mine) {
        return;
      }
      if (done != nullptr && (*done)()) {
        break;
      }
    }
    pass();
  }

  // Gives up the lead, and has another thread take it if tasks are left.
  void pass() REQUIRES(mutex) {
    led = false;
    if (tasks.empty()) {
      ended.notify_all();
    } else {
      wakeOne();
    }
  }

  bool leads() const REQUIRES(mutex) { return led && leader == std::this_thread::get_id(); }

  void run() {
    UniqueLock lock(mutex);
    for (;;) {
      work.wait(lock, [&]() REQUIRES(mutex) {
        return (!led && !tasks.empty()) || (closing && tasks.empty());
      });
      --idle;
      if (tasks.empty()) {
        break;
      }
      leadUntil(nullptr);
      ++idle;
    }
    --running;
    ended.notify_all();
  }
};

WorkerStream::WorkerStream(std::string threadName)
    : state_(std::make_shared<State>(std::move(threadName))) {}

WorkerStream::~WorkerStream() {
  if (state_->pid != getpid()) {
    // A forked child has none of the threads; a join would wait forever.
    neverDestroyed<std::shared_ptr<State>>(std::move(state_));
    return;
  }
  UniqueLock lock(state_->mutex);
  state_->closing = true;
  state_->work.notify_all();
  // If a task held the last reference to this stream, the calling thread is one of the stream's.
  size_t own = 0;
  for (const auto& thread : state_->threads) {
    own += thread.get_id() == std::this_thread::get_id();
  }
  const bool over = state_->ended.wait_for(
      lock, kPatience, [&]() REQUIRES(state_->mutex) { return state_->running == own; });
  auto threads = std::move(state_->threads);
  lock.unlock();
  for (auto& thread : threads) {
    if (over && thread.get_id() != std::this_thread::get_id()) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

void WorkerStream::start() {
  LockGuard lock(state_->mutex);
  if (state_->running == 0) {
    state_->wakeOne();
  }
}

void WorkerStream::enqueue(std::function<void()> task) {
  LockGuard lock(state_->mutex);
  state_->tasks.push_back({{}, std::move(task)});
  if (state_->led || state_->deferring.load(std::memory_order_relaxed)) {
    return;
  }
  try {
    state_->wakeOne();
  } catch (...) {
    state_->tasks.pop_back();
    throw;
  }
}

bool WorkerStream::idle() {
  LockGuard lock(state_->mutex);
  return !state_->led && state_->tasks.empty();
}

void WorkerStream::defer() {
  LockGuard lock(state_->mutex);
  state_->deferring.store(true, std::memory_order_relaxed);
}

void WorkerStream::wake() {
  if (!state_->deferring.load(std::memory_order_relaxed) || state_->pid != getpid()) {
    return;
  }
  LockGuard lock(state_->mutex);
  state_->deferring.store(false, std::memory_order_relaxed);
  if (!state_->led && !state_->tasks.empty()) {
    state_->wakeOne();
  }
}

void WorkerStream::handOver() {
  LockGuard lock(state_->mutex);
  if (state_->leads()) {
    ++state_->lead;
    state_->pass();
  }
}

void WorkerStream::drain() {
  if (state_->pid != getpid()) {
    return;  // a forked child has no thread that would run the queued tasks
  }
  wake();
  const auto state = state_;  // a task may drop the last reference to this stream
  UniqueLock lock(state->mutex);
  state->ended.wait(lock, [&]() REQUIRES(state->mutex) {
    return state->leads() || (!state->led && state->tasks.empty());
  });
}

void WorkerStream::runQueued(const std::function<bool()>& done) {
  const auto state = state_;  // a task may drop the last reference to this stream
  UniqueLock lock(state->mutex);
  if (!state->led && !state->tasks.empty() && !done()) {
    state->leadUntil(&done);
  }
}

}  // namespace torchcomms_pg
