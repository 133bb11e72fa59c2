#include "handle/BlockingCall.hpp"

#include <condition_variable>
#include <exception>
#include <utility>

#include "base/Mutex.hpp"
#include "base/Thread.hpp"
#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg {

struct BlockingCall::State {
  State(const Library& api, Body body) : api(api), body(std::move(body)) {}

  // Does what BlockingCall::take() does.
  ncclComm_t take() REQUIRES(mutex) {
    return done && result == ncclSuccess ? std::exchange(made, nullptr) : nullptr;
  }

  const Library& api;  // never freed
  const Body body;
  Mutex mutex;
  std::condition_variable ended;
  bool done GUARDED_BY(mutex) = false;
  bool left GUARDED_BY(mutex) = false;
  ncclResult_t result GUARDED_BY(mutex) = ncclInternalError;
  std::string text GUARDED_BY(mutex);
  // Written by the library during the call.
  ncclComm_t made = nullptr;
};

BlockingCall::BlockingCall(const Library& api, c10::Device device, Body body)
    : state_(std::make_shared<State>(api, std::move(body))) {
  startDetached("tcpg_nccl", "a communicator of libnccl", [state = state_, device] {
    auto result = ncclInternalError;
    std::string text;
    try {
      takeDevice(device);
      result = state->body(&state->made);
      text = result == ncclSuccess ? "" : state->api.getLastError(nullptr);
    } catch (const std::exception& error) {
      text = error.what();
    }
    UniqueLock lock(state->mutex);
    state->result = result;
    state->text = std::move(text);
    state->done = true;
    auto* const unwanted = state->left ? state->take() : nullptr;
    lock.unlock();
    state->ended.notify_all();
    if (unwanted != nullptr) {
      state->api.commAbort(unwanted);
    }
  });
}

bool BlockingCall::waitUntil(Clock::time_point deadline) const {
  UniqueLock lock(state_->mutex);
  return state_->ended.wait_until(
      lock, deadline, [&]() REQUIRES(state_->mutex) { return state_->done; });
}

bool BlockingCall::done() const {
  LockGuard lock(state_->mutex);
  return state_->done;
}

ncclResult_t BlockingCall::result() const {
  LockGuard lock(state_->mutex);
  return state_->result;
}

std::string BlockingCall::text() const {
  LockGuard lock(state_->mutex);
  return state_->text;
}

ncclComm_t BlockingCall::take() {
  LockGuard lock(state_->mutex);
  return state_->take();
}

void BlockingCall::leave() {
  ncclComm_t unwanted = nullptr;
  {
    LockGuard lock(state_->mutex);
    state_->left = true;
    unwanted = state_->take();
  }
  if (unwanted != nullptr) {
    state_->api.commAbort(unwanted);
  }
}

}  // namespace torchcomms_pg
