// Users' callbacks for what has finished, called from a thread of their own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace torchcomms_pg {

// A callback may take the GIL and any time, so it must not run on the thread
// that finished the operation. Owns the thread; ends it when destroyed, after
// the callbacks that are due.
class CallbackThread {
 public:
  CallbackThread();
  ~CallbackThread();
  CallbackThread(const CallbackThread&) = delete;
  CallbackThread& operator=(const CallbackThread&) = delete;

  void add(std::function<void()> callback);

  // Returns when everything added so far has run; at once when called from a
  // callback, which would wait for itself.
  void drain();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // shared with the thread, which may outlive this object
  std::thread thread_;
};

}  // namespace torchcomms_pg
