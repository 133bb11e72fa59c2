// A thread for what has to be done also where no more threads can be started. Knows nothing of
// torch.
#pragma once

#include <functional>
#include <memory>

namespace torchcomms_pg {

// Started, as "tcpg_spare", when it is made; raises where that cannot be. Ends when what it was
// given is done and the object has gone; nobody waits for that.
class SpareThread {
 public:
  SpareThread();
  ~SpareThread();
  SpareThread(const SpareThread&) = delete;
  SpareThread& operator=(const SpareThread&) = delete;

  // Bodies run one after another, so none may wait for another for ever.
  void run(std::function<void()> body);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchcomms_pg
