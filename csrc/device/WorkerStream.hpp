// A host stream that runs tasks one after another on its own threads.
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

// Owns a queue and the threads that run it: no thread until the first task, and usually one. The
// thread that runs the tasks, in order, is the leader. Before code that may wait for later tasks (a
// user's callback) the leader hands the lead over, and another thread is started if none is idle.
class WorkerStream final : public host::HostStream {
 public:
  // `threadName` has at most 15 characters.
  explicit WorkerStream(std::string threadName);

  // Runs the queued tasks, then ends the threads. A thread that does not end within `kPatience` is
  // detached.
  ~WorkerStream() override;

  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;

  // Starts a thread if none runs, so that no later task waits forever. Raises std::runtime_error if
  // none can be started.
  void start();

  // Raises as start() does; then `task` is not enqueued.
  void enqueue(std::function<void()> task) override;

  bool idle() override;

  // Makes enqueue() wake no thread until wake() is called, which raises as start() does.
  void defer();
  void wake();

  // Lets other threads run the later tasks while the calling task goes on. Does nothing in a thread
  // that is not the leader.
  void handOver();

  // Waits until the queue is empty and no task runs, except tasks that have called handOver().
  // Returns immediately if called from a task of this stream, which would wait for itself.
  void drain();

  // Runs queued tasks in the calling thread until `done` returns true, unless another thread is the
  // leader. A caller that would only wait saves the wake-up of a thread.
  void runQueued(const std::function<bool()>& done);

 private:
  static constexpr std::chrono::seconds kPatience{5};
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads, which may outlive this object
};

}  // namespace torchcomms_pg
