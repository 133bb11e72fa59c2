// A thread for tasks that must run even if no more threads can be started. Independent of torch.
#pragma once

#include <functional>
#include <memory>

namespace torchcomms_pg {

// The constructor starts the thread, "tcpg_spare", and raises if that fails. The thread ends when
// the object is destroyed and all tasks are done; the destructor does not wait for the thread.
class SpareThread {
 public:
  SpareThread();
  ~SpareThread();
  SpareThread(const SpareThread&) = delete;
  SpareThread& operator=(const SpareThread&) = delete;

  // Runs `body` after the earlier tasks. So a task must limit the time for which it waits for a
  // later task.
  void run(std::function<void()> body);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchcomms_pg
