#include "comm/Window.hpp"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "comm/Checks.hpp"
#include "comm/SharedTensor.hpp"
#include "comm/Types.hpp"

namespace torchcomms_pg {

namespace {

constexpr int kMaxDims = 64;

// What ranks tell each other of the tensors they register.
struct Description {
  int32_t dtype;
  int32_t signal;
  int64_t dims;
  int64_t sizes[kMaxDims];
};

Description describe(const at::Tensor& tensor, int signal) {
  Description description{static_cast<int32_t>(tensor.scalar_type()), signal, tensor.dim(), {}};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), description.sizes);
  return description;
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

}  // namespace

struct Window::Registration {
  ncclWindow_t handle = nullptr;
  int signal = 0;                             // sigIdx
  at::Tensor tensor;                          // where the window owns it
  std::vector<Part> parts;                    // by rank
  std::vector<std::atomic<uint64_t>> sent;    // signals, by peer
  std::vector<std::atomic<uint64_t>> waited;  // likewise

  std::mutex mutex;  // of what follows
  WorkPtr lastPut;   // asynchronous; those before it have ended when it has
  WorkPtr last;      // likewise, of all operations

  explicit Registration(int size) : sent(size), waited(size) {}

  WorkPtr pendingPut() {
    std::lock_guard lock(mutex);
    return lastPut;
  }
  WorkPtr pending() {
    std::lock_guard lock(mutex);
    return last;
  }
  void note(const WorkPtr& work, bool isPut) {
    std::lock_guard lock(mutex);
    last = work;
    if (isPut) {
      lastPut = work;
    }
  }
};

bool Communicator::supportsWindows() const {
  // Of those that have windows, only shared memory shows a peer's and puts without a signal.
  return api_.windowView != nullptr;
}

std::shared_ptr<Window> Communicator::newWindow() {
  const char* const what = name(OpKind::newWindow);
  TORCH_CHECK_NOT_IMPLEMENTED(
      supportsWindows(),
      what,
      ": windows are for CPU tensors of ranks on one host (backend 'shm'). Gloo has none, and "
      "NCCL, from 2.29.2 on, only puts that also signal, with one count of signals for all of a "
      "communicator's windows");
  TORCH_CHECK(!inBatch(), what, ": cannot be part of a group of operations; call it before");
  auto call = newCall(OpKind::newWindow, {.async = false, .timeout = std::nullopt});
  call.launch = [](ncclComm_t, cudaStream_t) { return ncclSuccess; };  // all is done in time
  launch(std::move(call), nullptr);
  return std::make_shared<Window>(shared_from_this());
}

at::Tensor Communicator::allocateTensor(int64_t numel, c10::ScalarType dtype) const {
  const char* const what = "allocate_tensor";
  TORCH_CHECK_NOT_IMPLEMENTED(
      api_.memAlloc != nullptr && device().is_cpu(), what, ": the loaded library cannot do this");
  return makeSharedTensor(what, api_, numel, dtype);
}

Window::Window(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {}

Window::~Window() {
  if (registration_ && comm_->pid_ == getpid()) {
    forget(*registration_);
  }
}

// Frees what the library has for it, as far as there is a library.
void Window::forget(Registration& registration) noexcept {
  std::lock_guard lock(comm_->commMutex_);
  if (auto* const comm = comm_->comm_.load(std::memory_order_acquire)) {
    comm_->api_.commWindowDeregister(comm, registration.handle);
  }
}

int Window::takeSignal() {
  std::lock_guard lock(comm_->windowMutex_);
  auto& used = comm_->windowSignals_;
  const auto free = std::find(used.begin(), used.end(), false);
  TORCH_CHECK(
      free != used.end(),
      "tensor_register: ",
      used.size(),
      " windows of this communicator have a tensor registered, which is the most; deregister one");
  *free = true;
  return static_cast<int>(free - used.begin());
}

void Window::giveSignal(int index) {
  std::lock_guard lock(comm_->windowMutex_);
  comm_->windowSignals_[index] = false;
}

void Window::refuseBatch(const char* what) const {
  TORCH_CHECK(
      !comm_->inBatch(),
      what,
      ": operations of windows cannot be part of a group of operations; issue them before or after "
      "it");
}

void Window::checkRank(const char* what, const char* argument, int64_t rank) const {
  torchcomms_pg::checkRank(what, argument, rank, comm_->size());
}

std::shared_ptr<Window::Registration> Window::registered(const char* what) const {
  comm_->usable();
  std::lock_guard lock(mutex_);
  TORCH_CHECK(
      registration_ != nullptr,
      what,
      ": no tensor is registered with this window; call tensor_register(tensor) on all ranks");
  return registration_;
}

void Window::registerTensor(const at::Tensor& tensor, bool owning) {
  const char* const what = name(OpKind::tensorRegister);
  comm_->usable();
  refuseBatch(what);
  checkTensor(what, "tensor", tensor, comm_->device());
  TORCH_CHECK_VALUE(
      tensor.has_storage() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(),
      what,
      ": tensor (shape ",
      tensor.sizes(),
      ", strides ",
      tensor.strides(),
      ") is not contiguous, and peers address its memory by element; pass tensor.contiguous()");
  TORCH_CHECK_VALUE(
      tensor.dim() <= kMaxDims,
      what,
      ": tensor has ",
      tensor.dim(),
      " dimensions, wanted at most ",
      kMaxDims);
  {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(
        registration_ == nullptr,
        what,
        ": a tensor is registered with this window already; call tensor_deregister() first");
  }
  moveToShared(what, comm_->api_, tensor);

  auto registration = std::make_shared<Registration>(comm_->size());
  registration->signal = takeSignal();
  if (owning) {
    registration->tensor = tensor;
  }
  const auto mine = describe(tensor, registration->signal);
  std::vector<Description> all(comm_->size());
  auto call = comm_->newCall(OpKind::tensorRegister, {.async = false, .timeout = std::nullopt});
  Communicator::describeTensors(call, {}, {tensor});
  call.launch = [&](ncclComm_t comm, cudaStream_t stream) {
    const auto& api = comm_->api_;
    const auto result = api.commWindowRegister(
        comm, tensor.data_ptr(), tensor.nbytes(), &registration->handle, NCCL_WIN_DEFAULT);
    return result != ncclSuccess
               ? result
               : api.allGather(&mine, all.data(), sizeof mine, ncclInt8, comm, stream);
  };
  try {
    comm_->launch(std::move(call), nullptr);
  } catch (...) {
    giveSignal(registration->signal);
    throw;
  }
  for (const auto& part : all) {
    TORCH_CHECK(
        part.signal == mine.signal,
        what,
        ": the ranks have registered and deregistered the tensors of their windows in different "
        "orders");
    Part described{
        static_cast<c10::ScalarType>(part.dtype), {part.sizes, part.sizes + part.dims}, 1};
    for (const auto size : described.sizes) {
      described.numel *= size;
    }
    registration->parts.push_back(std::move(described));
  }
  std::lock_guard lock(mutex_);
  registration_ = std::move(registration);
}

void Window::deregister() {
  const char* const what = name(OpKind::tensorDeregister);
  refuseBatch(what);
  const auto registration = registered(what);
  const int size = comm_->size();
  try {
    if (const auto pending = registration->pending()) {
      comm_->await(*pending, kNoTimeout);
    }
    // Every rank tells every other one how many signals it has sent to it. The
    // last of them has come after all puts; and what nobody waited for must not
    // be taken for a signal of the next window.
    std::vector<uint64_t> sent(registration->sent.begin(), registration->sent.end());
    std::vector<uint64_t> received(size);
    auto call = comm_->newCall(OpKind::tensorDeregister, {.async = false, .timeout = std::nullopt});
    call.launch = [&](ncclComm_t comm, cudaStream_t stream) {
      const auto& api = comm_->api_;
      auto result = api.allToAll(sent.data(), received.data(), 1, ncclUint64, comm, stream);
      std::vector<ncclWaitSignalDesc_t> left;
      for (int peer = 0; peer < size; ++peer) {
        const auto count = received[peer] - registration->waited[peer].load();
        if (result == ncclSuccess && count != 0) {
          left.push_back({static_cast<int>(count), peer, registration->signal, 0});
        }
      }
      if (!left.empty()) {
        result = api.waitSignal(static_cast<int>(left.size()), left.data(), comm, stream);
      }
      return result != ncclSuccess ? result : api.commWindowDeregister(comm, registration->handle);
    };
    comm_->launch(std::move(call), nullptr);
  } catch (...) {
    if (comm_->failure()) {
      forget(*registration);
      std::lock_guard lock(mutex_);
      registration_.reset();
    }
    throw;
  }
  giveSignal(registration->signal);
  std::lock_guard lock(mutex_);
  registration_.reset();
}

WorkPtr Window::put(
    const at::Tensor& tensor, int64_t destination, int64_t offset, const Options& options) {
  auto call = comm_->newCall(OpKind::put, options);
  const char* const what = name(call.op.kind);
  refuseBatch(what);
  const auto registration = registered(what);
  checkRank(what, "dst_rank", destination);
  checkTensor(what, "tensor", tensor, comm_->device());
  const auto& part = registration->parts[destination];
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == part.dtype,
      what,
      ": tensor has dtype ",
      tensor.scalar_type(),
      ", rank ",
      destination,
      " has registered ",
      part.dtype,
      "; convert it");
  TORCH_CHECK_VALUE(
      offset >= 0 && offset <= part.numel && tensor.numel() <= part.numel - offset,
      what,
      ": ",
      tensor.numel(),
      " elements at target_offset_nelems ",
      offset,
      " do not fit into the ",
      part.numel,
      " that rank ",
      destination,
      " has registered");
  const auto source = plain(tensor);
  Communicator::describeTensors(call, {source}, {});
  call.op.peer = static_cast<int>(destination);
  const auto wire = wireType(part.dtype);
  call.launch = [&api = comm_->api_,
                 source,
                 wire,
                 peer = call.op.peer,
                 handle = registration->handle,
                 at = offset * source.element_size()](ncclComm_t comm, cudaStream_t stream) {
    return api.putSignal(
        source.data_ptr(),
        source.numel() * wire.factor,
        wire.type,
        peer,
        handle,
        at,
        kNoSignal,
        0,
        0,
        comm,
        stream);
  };
  auto work = comm_->launch(std::move(call), nullptr);
  if (options.async) {
    registration->note(work, /*isPut=*/true);
  }
  return work;
}

WorkPtr Window::signal(int64_t peer, const Options& options) {
  auto call = comm_->newCall(OpKind::signal, options);
  const char* const what = name(call.op.kind);
  refuseBatch(what);
  const auto registration = registered(what);
  checkRank(what, "peer_rank", peer);
  call.op.peer = static_cast<int>(peer);
  call.launch = [&api = comm_->api_, to = call.op.peer, index = registration->signal](
                    ncclComm_t comm, cudaStream_t stream) {
    return api.signal(to, index, 0, 0, comm, stream);
  };
  if (!options.async) {
    // It would overtake a put that is still queued.
    if (const auto put = registration->pendingPut()) {
      comm_->await(*put, kNoTimeout);
    }
  }
  auto work = comm_->launch(std::move(call), nullptr);
  ++registration->sent[peer];
  if (options.async) {
    registration->note(work, /*isPut=*/false);
  }
  return work;
}

WorkPtr Window::waitSignal(int64_t peer, const Options& options) {
  auto call = comm_->newCall(OpKind::waitSignal, options);
  const char* const what = name(call.op.kind);
  refuseBatch(what);
  const auto registration = registered(what);
  checkRank(what, "peer_rank", peer);
  call.op.peer = static_cast<int>(peer);
  call.launch = [&api = comm_->api_, from = call.op.peer, index = registration->signal](
                    ncclComm_t comm, cudaStream_t stream) {
    ncclWaitSignalDesc_t one{1, from, index, 0};
    return api.waitSignal(1, &one, comm, stream);
  };
  auto work = comm_->launch(std::move(call), nullptr);
  ++registration->waited[peer];
  if (options.async) {
    registration->note(work, /*isPut=*/false);
  }
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
  WindowView view;
  auto* const comm = comm_->usable();
  const auto result =
      comm_->api_.windowView(comm, registration->handle, static_cast<int>(rank), view);
  TORCH_CHECK(result == ncclSuccess, what, ": ", comm_->api_.getLastError(comm));
  return at::from_blob(view.memory.get(), part.sizes, [memory = view.memory](void*) {}, options);
}

std::optional<Window::Part> Window::part() const {
  std::lock_guard lock(mutex_);
  return registration_ ? std::optional(registration_->parts[comm_->rank()]) : std::nullopt;
}

std::optional<at::Tensor> Window::tensor() const {
  std::lock_guard lock(mutex_);
  return registration_ && registration_->tensor.defined() ? std::optional(registration_->tensor)
                                                          : std::nullopt;
}

}  // namespace torchcomms_pg
