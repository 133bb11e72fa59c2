// A host stream that runs tasks one after another on its own threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/Mutex.hpp"
#include "host/HostStream.hpp"

namespace torchcomms_pg {

// Owns a queue of tasks, and threads: none until start() or the first task, then usually one. The
// thread that runs the tasks, in order, is the leader. Before code that may wait for later tasks (a
// user's callback), the leader gives up the lead to another thread, which is started if none is
// idle.
class WorkerStream final : public host::HostStream {
 public:
  // `threadName` has at most 15 characters.
  explicit WorkerStream(std::string threadName);

  // Runs the queued tasks and ends the threads. Detaches the threads if that takes over
  // `kPatience`.
  ~WorkerStream() override;

  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;

  // Starts a thread if the stream has none, so that later tasks can always run. Raises
  // std::runtime_error if no thread can be started.
  void start();

  // If no thread can be started, raises as start() does and does not enqueue `task`.
  void enqueue(std::function<void()> task) override;

  bool idle() override;

  // defer() keeps enqueue() from waking a thread until wake(), which raises as start() does.
  void defer();
  void wake();

  // Lets another thread run the later tasks while the calling task goes on. Does nothing unless the
  // calling thread is the leader.
  void handOver();

  // Waits until the queue is empty and no task runs, except tasks that have called handOver().
  // Returns at once in the leader, since its task would wait for itself.
  void drain();

  // Runs queued tasks in the calling thread until `done` returns true or none is left. Does nothing
  // if another thread is the leader. This saves the wake-up of a thread if the caller would only
  // wait.
  void runQueued(const std::function<bool()>& done);

 private:
  static constexpr std::chrono::seconds kPatience{5};
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads, which may outlive this object
};

}  // namespace torchcomms_pg
