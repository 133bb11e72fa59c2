// A thread for tasks that must run even where no more threads can be started. Knows nothing of
// torch.
#pragma once

#include <functional>
#include <memory>

namespace torchcomms_pg {

// Started, as "tcpg_spare", by the constructor, which raises if that fails. Ends when its tasks are
// done and the object has gone; no thread waits for that.
class SpareThread {
 public:
  SpareThread();
  ~SpareThread();
  SpareThread(const SpareThread&) = delete;
  SpareThread& operator=(const SpareThread&) = delete;

  // Runs `body` after those before it, so none may wait for another for ever.
  void run(std::function<void()> body);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchcomms_pg
