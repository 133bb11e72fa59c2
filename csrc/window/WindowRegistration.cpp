// Registration of a window's tensors, and its end.
#include "window/WindowRegistration.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "device/AcceleratorDevice.hpp"
#include "operation/Checks.hpp"
#include "window/SharedTensor.hpp"

namespace torchcomms_pg {

namespace {

constexpr int kMaxDims = 64;

// Description of a rank's tensor, as the ranks exchange it.
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

// Wraps `count` values as a CPU tensor of bytes.
template <class T>
at::Tensor bytesOf(const T* values, size_t count) {
  return at::from_blob(
      const_cast<T*>(values), {static_cast<int64_t>(count * sizeof(T))}, at::kByte);
}

}  // namespace

// Makes the library free its part of a registration, if the library's communicator still exists. On
// an accelerator, where streams may still write, only the end of the communicator frees that part.
void Window::forget(std::shared_ptr<Registration> registration) noexcept {
  if (comm_->queues()) {
    registration->forgetWorks();
    comm_->library().keepUntilEnd(std::move(registration));
    return;
  }
  comm_->library().with(
      [&](ncclComm_t comm) { comm_->api().commWindowDeregister(comm, registration->handle); });
}

// Runs a collective from `input` to `output`, CPU tensors, through copies on the device. Waits for
// the end and returns NCCL's result.
ncclResult_t Window::exchange(
    Collective collective, const at::Tensor& input, const at::Tensor& output, ncclComm_t comm,
    cudaStream_t stream) const {
  const auto in = input.to(device());
  const auto out = at::empty_like(output, at::TensorOptions(device()));
  collective.input = in.data_ptr();
  collective.output = out.data_ptr();
  const auto result = comm_->api().run(collective, comm, stream);
  if (result != ncclSuccess) {
    return result;
  }
  output.copy_(out);
  // Checks the error, since a failed operation leaves stale data in its output.
  ncclResult_t state = ncclSuccess;
  const auto asked = comm_->api().commGetAsyncError(comm, &state);
  return asked != ncclSuccess ? asked : state;
}

// Exchanges the descriptions of the ranks' tensors, and sets `parts`.
ncclResult_t Window::describeAll(
    Registration& registration, ncclComm_t comm, cudaStream_t stream) const {
  const char* const what = name(OpKind::tensorRegister);
  const auto mine = describe(registration.tensor, registration.signal);
  std::vector<Description> all(comm_->size());
  const auto result = exchange(
      {.kind = CollectiveKind::allGather, .count = sizeof mine}, bytesOf(&mine, 1),
      bytesOf(all.data(), all.size()), comm, stream);
  if (result != ncclSuccess) {
    return result;
  }
  for (const auto& part : all) {
    TORCH_CHECK(
        part.signal == mine.signal, what,
        ": the ranks have registered and deregistered the tensors of their windows in different "
        "orders");
    Part described{static_cast<c10::ScalarType>(part.dtype), {part.sizes, part.sizes + part.dims}};
    described.numel = c10::multiply_integers(described.sizes);
    registration.parts.push_back(std::move(described));
  }
  if (mapsPeers()) {
    const auto bytes = [](const Part& part) {
      return part.numel * static_cast<int64_t>(c10::elementSize(part.dtype));
    };
    for (int rank = 0; rank < comm_->size(); ++rank) {
      TORCH_CHECK_VALUE(
          bytes(registration.parts[rank]) == bytes(registration.parts[0]) &&
              bytes(registration.parts[0]) > 0,
          what, ": rank 0 registers ", bytes(registration.parts[0]), " bytes, rank ", rank, " ",
          bytes(registration.parts[rank]), "; NCCL wants as many of all ranks, and more than 0");
    }
  }
  return ncclSuccess;
}

// Sets `mapped` to the memory of all ranks, which this rank's device reaches by loads and stores.
ncclResult_t Window::mapAll(
    Registration& registration, ncclComm_t comm, cudaStream_t stream) const {
  const auto& api = comm_->api();
  const int size = comm_->size();
  const int after = (comm_->rank() + 1) % size;
  ncclWaitSignalDesc_t before{1, (comm_->rank() + size - 1) % size, registration.signal, 0};
  // In NCCL 2.29 and 2.30 the first signal, which sets signals up, is collective: all ranks send
  // one.
  auto result = api.signal(after, registration.signal, 0, 0, comm, stream);
  if (result == ncclSuccess) {
    result = api.waitSignal(1, &before, comm, stream);
  }
  int32_t missing = -1;
  for (int rank = 0; result == ncclSuccess && rank < size; ++rank) {
    void* memory = nullptr;
    // A null handle means that NCCL cannot map this memory.
    if (registration.handle != nullptr) {
      result = api.getPeerDevicePointer(registration.handle, 0, rank, &memory);
    }
    if (memory == nullptr) {
      missing = rank;
      break;
    }
    const auto& part = registration.parts[rank];
    registration.mapped.push_back(
        at::for_blob(memory, {part.numel})
            .options(at::TensorOptions().dtype(part.dtype).device(device()))
            .target_device(device())
            .make_tensor());
  }
  std::vector<int32_t> all(size);
  if (result == ncclSuccess) {
    result = exchange(
        {.kind = CollectiveKind::allGather, .count = 1, .type = ncclInt32}, bytesOf(&missing, 1),
        bytesOf(all.data(), all.size()), comm, stream);
  }
  for (int rank = 0; result == ncclSuccess && rank < size; ++rank) {
    TORCH_CHECK(
        all[rank] < 0, name(OpKind::tensorRegister), ": rank ", rank,
        " cannot map the memory of rank ", all[rank],
        "; windows are for GPUs that reach each other's memory, of one host or NVLink domain, with "
        "NCCL_CUMEM_ENABLE not 0");
  }
  return result;
}

void Window::registerTensor(const at::Tensor& tensor, bool owning) {
  const char* const what = name(OpKind::tensorRegister);
  comm_->joining().usable();
  refuseDeferral(what);
  checkDense({what, "tensor"}, tensor, comm_->device());
  TORCH_CHECK_VALUE(
      tensor.has_storage() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(), what,
      ": tensor (shape ", tensor.sizes(), ", strides ", tensor.strides(),
      ") is not contiguous, and peers address its memory by element; pass tensor.contiguous()");
  TORCH_CHECK_VALUE(
      tensor.dim() <= kMaxDims, what, ": tensor has ", tensor.dim(), " dimensions, wanted at most ",
      kMaxDims);
  {
    LockGuard lock(mutex_);
    TORCH_CHECK(
        registration_ == nullptr, what,
        ": a tensor is registered with this window already; call tensor_deregister() first");
  }
  moveToShared(what, comm_->api(), tensor);

  auto registration = std::make_shared<Registration>(comm_->size());
  registration->signal = comm_->signalSlots().take(comm_->device());
  registration->tensor = tensor;
  auto call = comm_->prepare(OpKind::tensorRegister, {.async = false, .timeout = std::nullopt});
  call.setTensors({}, {tensor});
  call.task = [&](ncclComm_t comm, cudaStream_t stream) {
    auto result = describeAll(*registration, comm, stream);
    if (result == ncclSuccess) {
      result = comm_->api().commWindowRegister(
          comm, tensor.data_ptr(), tensor.nbytes(), &registration->handle, NCCL_WIN_COLL_SYMMETRIC);
    }
    return result == ncclSuccess && mapsPeers() ? mapAll(*registration, comm, stream) : result;
  };
  try {
    comm_->launch(std::move(call));
  } catch (...) {
    comm_->signalSlots().give(registration->signal);
    if (registration->handle != nullptr) {
      forget(std::move(registration));
    }
    throw;
  }
  if (!owning) {
    registration->tensor.reset();
  }
  LockGuard lock(mutex_);
  registration_ = std::move(registration);
}

void Window::deregister() {
  const char* const what = name(OpKind::tensorDeregister);
  refuseDeferral(what);
  const auto registration = registered(what);
  const int size = comm_->size();
  try {
    if (const auto pending = registration->pending()) {
      comm_->await(*pending, kNoTimeout);
    }
    for (const auto& stream : registration->streams()) {
      auto* const accelerator = comm_->executor().accelerator();
      accelerator->record(stream, /*timed=*/false)->block(accelerator->currentStream());
    }
    // The ranks exchange how many signals each has sent to each other rank. This rank's puts end
    // before that exchange, so no rank writes after the exchange. Signals that no wait has taken
    // are taken now, so that the next window does not count them.
    const std::vector<uint64_t> sent(registration->sent.begin(), registration->sent.end());
    std::vector<uint64_t> received(size);
    auto call = comm_->prepare(OpKind::tensorDeregister, {.async = false, .timeout = std::nullopt});
    call.task = [&](ncclComm_t comm, cudaStream_t stream) {
      const auto& api = comm_->api();
      auto result = exchange(
          {.kind = CollectiveKind::allToAll, .count = 1, .type = ncclUint64},
          bytesOf(sent.data(), sent.size()), bytesOf(received.data(), received.size()), comm,
          stream);
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
    comm_->launch(std::move(call));
  } catch (...) {
    if (comm_->failureState().get()) {
      forget(registration);
      LockGuard lock(mutex_);
      registration_.reset();
    }
    throw;
  }
  comm_->signalSlots().give(registration->signal);
  LockGuard lock(mutex_);
  registration_.reset();
}

}  // namespace torchcomms_pg
