#include "diagnosis/group/BackwardPass.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace torchcomms_pg {

namespace {

// The last pass of a thread.
struct Last {
  int task = -1;  // autograd's number of the pass
  std::shared_ptr<BackwardPass> pass;
};
thread_local Last lastOfThread;

}  // namespace

std::shared_ptr<BackwardPass> BackwardPass::join(const std::shared_ptr<ArrivalLog>& log) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {
    return nullptr;
  }
  if (!lastOfThread.pass || lastOfThread.task != task) {
    lastOfThread = {task, std::make_shared<BackwardPass>()};
    lastOfThread.pass->log_ = log;
    // This callback runs before DDP's, which waits: DDP queues its callback later, with the last
    // collective of the pass.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [known = std::weak_ptr(lastOfThread.pass)] {
          if (const auto pass = known.lock()) {
            pass->passed_ = Clock::now().time_since_epoch().count();
          }
        });
  }
  lastOfThread.pass->inFlight_.fetch_add(1);
  return lastOfThread.pass;
}

void BackwardPass::end() {
  ended_ = Clock::now().time_since_epoch().count();
  inFlight_.fetch_sub(1);
}

void BackwardPass::settle() {
  if (!lastOfThread.pass || lastOfThread.pass->passed_ == 0) {
    return;
  }
  const auto pass = std::exchange(lastOfThread.pass, nullptr);
  const Clock::duration waited(pass->ended_ - pass->passed_);
  if (pass->inFlight_ == 0 && waited > Clock::duration::zero()) {
    WaitedTime::add(waited);
    if (const auto log = pass->log_.lock()) {
      log->addWait(waited);
    }
  }
}

void BackwardPass::forget() {
  lastOfThread.pass = nullptr;
}

}  // namespace torchcomms_pg
