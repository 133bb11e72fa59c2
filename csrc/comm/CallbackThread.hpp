// A thread that calls users' callbacks for finished operations.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace torchcomms_pg {

// Owns a thread, since a callback may take the GIL and any time, and so must not run on the thread
// that finished the operation. Ends the thread when destroyed, after the callbacks that are due.
class CallbackThread {
 public:
  CallbackThread();
  ~CallbackThread();
  CallbackThread(const CallbackThread&) = delete;
  CallbackThread& operator=(const CallbackThread&) = delete;

  void add(std::function<void()> callback);

  // Returns when all callbacks added so far have run; at once when called from a callback, which
  // would wait for itself.
  void drain();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // shared with the thread, which may outlive this object
  std::thread thread_;
};

}  // namespace torchcomms_pg
