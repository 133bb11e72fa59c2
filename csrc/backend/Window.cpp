// c10d's one-sided windows, which torch has from 2.14 on.
#include "window/Window.hpp"

#include <utility>

#include "backend/Backend.hpp"

namespace torchcomms_pg {

namespace {

// Ignores `opts.hints`, which are for other backends.
class GroupWindow final : public latest::Window {
 public:
  explicit GroupWindow(std::shared_ptr<torchcomms_pg::Window> window)
      : window_(std::move(window)) {}

  void tensor_register(const at::Tensor& tensor, bool owning) override {
    window_->registerTensor(tensor, owning);
  }

  void tensor_deregister() override { window_->deregister(); }

  c10::intrusive_ptr<c10d::Work> put(
      const at::Tensor& tensor, int64_t destination, int64_t offset, bool async,
      const latest::PutOptions& opts) override {
    const auto options = optionsOf(async, opts.timeout);
    return given(window_->put(tensor, destination, offset, options), OpKind::put);
  }

  c10::intrusive_ptr<c10d::Work> signal(
      int64_t peer, bool async, const latest::SignalOptions& opts) override {
    return given(window_->signal(peer, optionsOf(async, opts.timeout)), OpKind::signal);
  }

  c10::intrusive_ptr<c10d::Work> wait_signal(
      int64_t peer, bool async, const latest::WaitSignalOptions& opts) override {
    return given(window_->waitSignal(peer, optionsOf(async, opts.timeout)), OpKind::waitSignal);
  }

  at::Tensor map_remote_tensor(int64_t rank) override { return window_->mapRemoteTensor(rank); }

  latest::WindowAttr get_attr(int64_t peer) override {
    window_->checkRank("get_attr", "peer_rank", peer);
    return {latest::WindowAccessType::UNIFIED};  // all ranks share the memory
  }

 private:
  // Returns a Work in any case: unlike for a collective, c10d's callers always wait for it.
  c10::intrusive_ptr<c10d::Work> given(WorkPtr work, OpKind kind) const {
    return work ? std::move(work) : window_->finishedWork(kind);
  }

  const std::shared_ptr<torchcomms_pg::Window> window_;
};

}  // namespace

bool Backend::supportsWindow() const {
  const auto all = communicators();
  return std::any_of(all.begin(), all.end(), [](const auto& comm) {
    return torchcomms_pg::Window::supported(*comm);
  });
}

c10::intrusive_ptr<latest::Window> Backend::new_window(const std::optional<at::Tensor>& tensor) {
  const auto device = tensor ? tensor->device() : getBoundDeviceId().value_or(at::kCPU);
  auto window = torchcomms_pg::Window::make(communicator("new_window", device));
  if (tensor) {
    window->registerTensor(*tensor, /*owning=*/true);
  }
  return c10::make_intrusive<GroupWindow>(std::move(window));
}

}  // namespace torchcomms_pg
