// One-sided communication: puts, signals, and the memory of peers.
#include "window/Window.hpp"

#include <ATen/ATen.h>
#include <utility>

#include "base/TorchCompat.hpp"
#include "device/AcceleratorDevice.hpp"
#include "operation/Checks.hpp"
#include "operation/Types.hpp"
#include "window/SharedTensor.hpp"
#include "window/WindowRegistration.hpp"

namespace torchcomms_pg {

bool Window::supported(const Communicator& comm) {
  return comm.api().has(Feature::windows);
}

std::shared_ptr<Window> Window::make(const std::shared_ptr<Communicator>& comm) {
  const char* const what = name(OpKind::newWindow);
  TORCH_CHECK_NOT_IMPLEMENTED(
      supported(*comm), what,
      comm->device().is_cpu()
          ? ": windows on the CPU are for ranks of one host (backend 'shm'); Gloo has none"
          : std::string(": the loaded library lacks ") + introduced(Feature::windows).functions +
                ", which came with NCCL " + introduced(Feature::windows).version +
                "; python -m torchcomms_pg.nccl tells which one is loaded");
  TORCH_CHECK(
      !comm->batches().open(), what, ": cannot be part of a group of operations; call it before");
  auto call = comm->prepare(OpKind::newWindow, {.async = false, .timeout = std::nullopt});
  call.task = [](ncclComm_t, cudaStream_t) { return ncclSuccess; };  // nothing to do
  comm->launch(std::move(call));
  return std::make_shared<Window>(comm);
}

Window::Window(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {}

Window::~Window() {
  if (registration_ && comm_->ofThisProcess()) {
    forget(std::move(registration_));
  }
}

void Window::refuseDeferral(const char* what) const {
  TORCH_CHECK(
      !comm_->batches().open(), what,
      ": operations of windows cannot be part of a group of operations; issue them before or after "
      "it");
  auto* const accelerator = comm_->executor().accelerator();
  TORCH_CHECK(
      accelerator == nullptr || !isCapturing(accelerator->currentStream()), what,
      ": operations of windows cannot be captured in a graph, since a signal is counted once and "
      "not with each replay; issue them before or after the capture");
}

void Window::checkRank(const char* what, const char* argument, int64_t rank) const {
  torchcomms_pg::checkRank({what, argument}, rank, comm_->size());
}

std::shared_ptr<Window::Registration> Window::registered(const char* what) const {
  comm_->joining().usable();
  LockGuard lock(mutex_);
  TORCH_CHECK(
      registration_ != nullptr, what,
      ": no tensor is registered with this window; call tensor_register(tensor) on all ranks");
  return registration_;
}

WorkPtr Window::launch(Registration& registration, PreparedOp call) {
  const bool isPut = call.op.kind == OpKind::put;
  auto work = comm_->launch(std::move(call));
  if (work && work->operation().async) {
    registration.note(work, isPut);
  }
  return work;
}

WorkPtr Window::put(
    const at::Tensor& tensor, int64_t destination, int64_t offset, const Options& options) {
  auto call = comm_->prepare(OpKind::put, options);
  const char* const what = name(call.op.kind);
  refuseDeferral(what);
  const auto registration = registered(what);
  checkRank(what, "dst_rank", destination);
  checkDense({what, "tensor"}, tensor, comm_->device());
  const auto& part = registration->parts[destination];
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == part.dtype, what, ": tensor has dtype ", tensor.scalar_type(),
      ", rank ", destination, " has registered ", part.dtype, "; convert it");
  TORCH_CHECK_VALUE(
      offset >= 0 && offset <= part.numel && tensor.numel() <= part.numel - offset, what, ": ",
      tensor.numel(), " elements at offset ", offset, " do not fit into the ", part.numel,
      " that rank ", destination, " has registered");
  auto source = tensor.detach().resolve_conj().resolve_neg().contiguous();
  call.setTensors({source}, {});
  call.op.peer = static_cast<int>(destination);
  if (mapsPeers()) {
    if (destination == comm_->rank()) {
      source = source.clone();  // `source` may be part of the window
    }
    if (!options.async) {
      registration->note(comm_->executor().accelerator()->currentStream());
    }
    call.task = [source = source.view({-1}),
                 target = registration->mapped[destination].narrow(0, offset, source.numel())](
                    ncclComm_t, cudaStream_t) {
      target.copy_(source);
      return ncclSuccess;
    };
  } else {
    const auto wire = wireType(part.dtype);
    call.task = [&api = comm_->api(), source, wire, peer = call.op.peer,
                 handle = registration->handle,
                 at = offset * source.element_size()](ncclComm_t comm, cudaStream_t stream) {
      return api.put(
          source.data_ptr(), source.numel() * wire.factor, wire.type, peer, handle, at, comm,
          stream);
    };
  }
  return launch(*registration, std::move(call));
}

WorkPtr Window::signal(int64_t peer, const Options& options) {
  auto call = comm_->prepare(OpKind::signal, options);
  const char* const what = name(call.op.kind);
  refuseDeferral(what);
  const auto registration = registered(what);
  checkRank(what, "dst_rank", peer);
  call.op.peer = static_cast<int>(peer);
  call.task = [&api = comm_->api(), to = call.op.peer, index = registration->signal](
                  ncclComm_t comm, cudaStream_t stream) {
    return api.signal(to, index, 0, 0, comm, stream);
  };
  if (!options.async) {
    // Without this wait, a synchronous signal would overtake a put that is still queued.
    if (const auto put = registration->pendingPut()) {
      comm_->await(*put, kNoTimeout);
    }
  }
  auto work = launch(*registration, std::move(call));
  ++registration->sent[peer];
  return work;
}

WorkPtr Window::waitSignal(int64_t peer, const Options& options) {
  auto call = comm_->prepare(OpKind::waitSignal, options);
  const char* const what = name(call.op.kind);
  refuseDeferral(what);
  const auto registration = registered(what);
  checkRank(what, "peer_rank", peer);
  call.op.peer = static_cast<int>(peer);
  call.task = [&api = comm_->api(), from = call.op.peer, index = registration->signal](
                  ncclComm_t comm, cudaStream_t stream) {
    ncclWaitSignalDesc_t one{1, from, index, 0};
    return api.waitSignal(1, &one, comm, stream);
  };
  auto work = launch(*registration, std::move(call));
  ++registration->waited[peer];
  return work;
}

at::Tensor Window::mapRemoteTensor(int64_t rank) const {
  const char* const what = "map_remote_tensor";
  const auto registration = registered(what);
  checkRank(what, "rank", rank);
  const auto& part = registration->parts[rank];
  const auto options = at::TensorOptions().dtype(part.dtype).device(comm_->device());
  if (part.numel == 0) {
    return at::empty(part.sizes, options);
  }
  if (mapsPeers()) {
    return registration->mapped[rank].view(part.sizes);
  }
  WindowView view;
  auto* const comm = comm_->joining().usable();
  const auto result =
      comm_->api().windowView(comm, registration->handle, static_cast<int>(rank), view);
  TORCH_CHECK(result == ncclSuccess, what, ": ", comm_->api().getLastError(comm));
  return at::from_blob(view.memory.get(), part.sizes, [memory = view.memory](void*) {}, options);
}

std::optional<Window::Part> Window::part() const {
  LockGuard lock(mutex_);
  return registration_ ? std::optional(registration_->parts[comm_->rank()]) : std::nullopt;
}

std::optional<at::Tensor> Window::tensor() const {
  LockGuard lock(mutex_);
  return registration_ && registration_->tensor.defined() ? std::optional(registration_->tensor)
                                                          : std::nullopt;
}

}  // namespace torchcomms_pg
