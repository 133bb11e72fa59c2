// A host stream: tasks run one after another, on threads of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host/HostStream.hpp"

namespace torchcomms_pg {

// Owns a queue and the threads that run it: none until the first task, and
// usually one. One thread at a time leads, that is runs tasks in order. A
// leader that is about to run code which may wait for later tasks (a user's
// callback) hands the lead over, and another thread is started if none is idle.
class WorkerStream final : public host::HostStream {
 public:
  explicit WorkerStream(std::string threadName);

  // Runs what is queued, then ends the threads. A thread that does not end within `kPatience` is
  // left behind.
  ~WorkerStream() override;

  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;

  // Starts a thread if there is none, so that nothing that is enqueued waits for ever. Raises
  // std::runtime_error if none can be started.
  void start();

  // Raises as start() does; then `task` has not been taken.
  void enqueue(std::function<void()> task) override;

  bool idle() override;

  // Defers: enqueue() wakes no thread until wake() is called, which raises as start() does.
  void defer();
  void wake();

  // Lets the tasks behind the calling one run in other threads while that goes on. Does nothing in
  // any other thread.
  void handOver();

  // Returns when no task is queued or runs, but for those that have handed over; at once when
  // called from a task, which would wait for itself.
  void drain();

  // Runs queued tasks in the calling thread until `done`, as long as no other
  // thread leads: a caller that would only wait saves the wake-up of a thread.
  void runQueued(const std::function<bool()>& done);

 private:
  static constexpr std::chrono::seconds kPatience{5};
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads, which may outlive this object
};

}  // namespace torchcomms_pg
