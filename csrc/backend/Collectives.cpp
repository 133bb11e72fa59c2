// c10d's operations in terms of the Communicator's.
#include <utility>

#include "backend/Backend.hpp"
#include "backend/QueuedWork.hpp"
#include "base/TextStreams.hpp"
#include "collectives/Collectives.hpp"
#include "device/AcceleratorDevice.hpp"
#include "operation/Checks.hpp"

namespace torchcomms_pg {

namespace {

template <class Opts>
Communicator::Options options(const Opts& opts) {
  return optionsOf(opts.asyncOp, opts.timeout);
}

template <class Opts>
int rootOf(const Opts& opts) {
  return static_cast<int>(opts.rootRank);
}

template <class List>
auto& single(const char* what, const char* argument, List& list) {
  TORCH_CHECK_VALUE(
      list.size() == 1, what, ": ", argument, " has ", list.size(),
      " entries, wanted one: a process drives one device of a group");
  return list.front();
}

void sameLength(const char* what, size_t outputs, size_t inputs) {
  TORCH_CHECK_VALUE(
      outputs == inputs && outputs > 0, what, ": ", outputs, " outputs and ", inputs,
      " inputs were given, wanted as many of one as of the other, and at least one");
}

// Words the failure of a monitored barrier as ProcessGroupGloo does, since programs may parse it.
Failure toGlooMessage(Failure failure, int rank, bool allRanks, const c10d::BarrierOptions& opts) {
  const auto& missing = failure.ranks;
  if (missing.empty()) {
    return failure;
  }
  TextWriter text;
  if (rank != 0) {
    text << "Rank " << rank << " successfully reached monitoredBarrier, but received errors while "
         << "waiting for send/recv from rank 0. ";
  } else if (opts.timeout.count() == 0) {
    text << "Rank 0 timed out in monitoredBarrier after 0 ms. ";
  } else {
    const bool several = allRanks && missing.size() > 1;
    text << (several ? "Ranks " + joinRanks(missing) : "Rank " + std::to_string(missing.front()))
         << " failed to pass monitoredBarrier. ";
  }
  failure.message = text.str() + failure.message;
  return failure;
}

}  // namespace

template <class Body>
Backend::WorkPtr Backend::issue(const CommPtr& comm, bool async, Body&& body) {
  try {
    WorkPtr work = body();
    // Returns no Work for a synchronous call in a batch: c10d would wait for the Work before the
    // batch is launched.
    return !async && comm->batches().open() ? nullptr : work;
  } catch (...) {
    // The exception most likely leaves the caller's coalescing context.
    dropBatches();
    throw;
  }
}

template <class Opts, class Collective, class... Args>
C10_ALWAYS_INLINE Backend::WorkPtr Backend::issue(
    const char* what, const at::Tensor& tensor, const Opts& opts, Collective collective,
    const Args&... args) {
  const auto comm = route(what, tensor);
  return issue(comm, opts.asyncOp, [&] { return collective(*comm, options(opts), args...); });
}

template <class Each>
Backend::WorkPtr Backend::together(
    const char* what, bool async, OpKind parts, const TensorList& inputs, const Each& each) {
  const auto comm = route(what, inputs.front());
  return issue(comm, async, [&]() -> WorkPtr {
    const bool joins = comm->batches().open();
    if (!joins) {
      comm->batches().start(parts, inputs);
    }
    WorkPtr last;
    for (size_t i = 0; i < inputs.size(); ++i) {
      last = each(*comm, i);
    }
    return joins ? last : WorkPtr(comm->batches().end());
  });
}

Backend::WorkPtr Backend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  const auto& tensor = single("broadcast", "tensors", tensors);
  return issue("broadcast", tensor, opts, collectives::broadcast, tensor, rootOf(opts));
}

Backend::WorkPtr Backend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = single("all_reduce", "tensors", tensors);
  if (tensor.is_sparse()) {
    return allreduce_sparse(tensors, opts);
  }
  return issue("all_reduce", tensor, opts, collectives::allReduce, tensor, tensor, opts.reduceOp);
}

Backend::WorkPtr Backend::allreduce_coalesced(
    TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  constexpr const char* kWhat = "all_reduce_coalesced";
  sameLength(kWhat, tensors.size(), tensors.size());
  return together(kWhat, opts.asyncOp, OpKind::allReduce, tensors, [&](auto& comm, size_t i) {
    return collectives::allReduce(comm, options(opts), tensors[i], tensors[i], opts.reduceOp);
  });
}

Backend::WorkPtr Backend::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  const auto& tensor = single("reduce", "tensors", tensors);
  return issue("reduce", tensor, opts, collectives::reduce, tensor, rootOf(opts), opts.reduceOp);
}

Backend::WorkPtr Backend::allgather(
    std::vector<TensorList>& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) {
  const auto& input = single("all_gather", "tensors", inputs);
  const auto& output = single("all_gather", "tensor lists", outputs);
  return issue("all_gather", input, opts, collectives::allGather, output, input);
}

Backend::WorkPtr Backend::all_gather_single(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return issue("all_gather_single", input, opts, collectives::allGatherSingle, output, input);
}

Backend::WorkPtr Backend::allgather_coalesced(
    std::vector<TensorList>& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) {
  constexpr const char* kWhat = "all_gather_coalesced";
  // Fills outputs[rank][i] with inputs[i] of that rank, as Gloo does.
  TORCH_CHECK_VALUE(
      outputs.size() == static_cast<size_t>(getSize()), kWhat, ": output lists for ",
      outputs.size(), " ranks were given, wanted ", getSize());
  for (const auto& list : outputs) {
    sameLength(kWhat, list.size(), inputs.size());
  }
  return together(kWhat, opts.asyncOp, OpKind::allGather, inputs, [&](auto& comm, size_t i) {
    TensorList ofRanks;
    for (const auto& list : outputs) {
      ofRanks.push_back(list[i]);
    }
    return collectives::allGather(comm, options(opts), ofRanks, inputs[i]);
  });
}

Backend::WorkPtr Backend::all_gather_single_coalesced(
    TensorList& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) {
  constexpr const char* kWhat = "all_gather_single_coalesced";
  sameLength(kWhat, outputs.size(), inputs.size());
  return together(kWhat, opts.asyncOp, OpKind::allGatherSingle, inputs, [&](auto& comm, size_t i) {
    return collectives::allGatherSingle(comm, options(opts), outputs[i], inputs[i]);
  });
}

Backend::WorkPtr Backend::gather(
    std::vector<TensorList>& outputs, TensorList& inputs, const c10d::GatherOptions& opts) {
  const auto& input = single("gather", "tensors", inputs);
  // Ranks other than the root pass no list, or an empty one.
  const auto& output = outputs.empty() ? TensorList() : single("gather", "gather_list", outputs);
  return issue("gather", input, opts, collectives::gather, output, input, rootOf(opts));
}

Backend::WorkPtr Backend::gather_single(
    at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  return issue(
      "gather_single", input, opts, collectives::gatherSingle, output, input, rootOf(opts));
}

Backend::WorkPtr Backend::scatter(
    TensorList& outputs, std::vector<TensorList>& inputs, const c10d::ScatterOptions& opts) {
  const auto& output = single("scatter", "tensors", outputs);
  const auto& input = inputs.empty() ? TensorList() : single("scatter", "scatter_list", inputs);
  return issue("scatter", output, opts, collectives::scatter, output, input, rootOf(opts));
}

Backend::WorkPtr Backend::reduce_scatter(
    TensorList& outputs, std::vector<TensorList>& inputs, const c10d::ReduceScatterOptions& opts) {
  const auto& output = single("reduce_scatter", "tensors", outputs);
  const auto& input = single("reduce_scatter", "input lists", inputs);
  return issue(
      "reduce_scatter", output, opts, collectives::reduceScatter, output, input, opts.reduceOp);
}

Backend::WorkPtr Backend::reduce_scatter_single(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return issue(
      "reduce_scatter_single", input, opts, collectives::reduceScatterSingle, output, input,
      opts.reduceOp);
}

Backend::WorkPtr Backend::reduce_scatter_single_coalesced(
    TensorList& outputs, TensorList& inputs, const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kWhat = "reduce_scatter_single_coalesced";
  sameLength(kWhat, outputs.size(), inputs.size());
  constexpr auto kParts = OpKind::reduceScatterSingle;
  return together(kWhat, opts.asyncOp, kParts, inputs, [&](auto& comm, size_t i) {
    return collectives::reduceScatterSingle(
        comm, options(opts), outputs[i], inputs[i], opts.reduceOp);
  });
}

Backend::WorkPtr Backend::all_to_all_single(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
    std::vector<int64_t>& inputSplits, const c10d::AllToAllOptions& opts) {
  return issue(
      "all_to_all_single", input, opts, collectives::allToAllSingle, output, input, outputSplits,
      inputSplits);
}

Backend::WorkPtr Backend::alltoall(
    TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "all_to_all: input_tensor_list is empty");
  return issue("all_to_all", inputs.front(), opts, collectives::allToAll, outputs, inputs);
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  const auto comm = barrierCommunicator(opts);
  return issue(comm, opts.asyncOp, [&] { return collectives::barrier(*comm, options(opts)); });
}

// Returns the device whose current stream the barrier follows: the device of `device_ids`, else
// `opts.device`, else the current one. c10d leaves `opts.device` unset even if it has chosen a
// device, which may be the CPU. Returns nullopt without an accelerator, and in a group of backend
// "gloo": programs pass `device_ids` to it, too, and Gloo ignores them.
std::optional<at::Device> Backend::barrierDevice(const c10d::BarrierOptions& opts) const {
  const auto type = presentAccelerator();
  if (!type || options_->backend != kBackendName) {
    return std::nullopt;
  }
  if (opts.device_ids.empty()) {
    return opts.device ? opts.device : c10::impl::VirtualGuardImpl(*type).getDevice();
  }
  TORCH_CHECK_VALUE(
      opts.device_ids.size() == 1, "barrier: device_ids names ", opts.device_ids.size(),
      " devices, wanted one, that of this rank");
  return at::Device(*type, static_cast<at::DeviceIndex>(opts.device_ids.front()));
}

// Chooses the communicator of a barrier, the same on all ranks whatever devices they choose: the
// communicator of the accelerator that the group used first, else the CPU's. Makes no communicator,
// and so does not wait for ranks that chose another device.
Backend::CommPtr Backend::barrierCommunicator(const c10d::BarrierOptions& opts) {
  prepare("barrier");
  const auto device = barrierDevice(opts);
  CommPtr used;
  bool joined = false;  // the group has a communicator for `device`
  {
    LockGuard lock(communicatorsMutex_);
    used = accelerators_.empty() ? nullptr : accelerators_.front();
    joined = device && find(*device, std::nullopt) != nullptr;
  }
  // Leaves `device` alone, unless the program has named it or the group has a communicator for it.
  const bool chosen = !opts.device_ids.empty() || joined;
  if (used == nullptr) {
    auto cpu = cpuCommunicator("barrier");
    if (device && !device->is_cpu()) {
      refuseCapture(options_->group_name, *device);
      if (chosen) {
        awaitCurrentStream(*device);
      }
    }
    return cpu;
  }
  if (chosen && *device != used->device()) {
    orderStreams(currentStream(*device), currentStream(used->device()));
  }
  return used;
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  // The error names all missing ranks even without `waitAllRanks`: shared memory shows all of them.
  auto call = options(opts);
  call.async = false;
  try {
    collectives::monitoredBarrier(*cpuCommunicator("monitored_barrier"), call);
  } catch (const CommError& error) {
    if (options_->backend == kBackendName) throw;
    throw CommError(toGlooMessage(error.failure(), getRank(), waitAllRanks, opts));
  }
}

Backend::WorkPtr Backend::send(TensorList& tensors, int destination, int tag) {
  const auto& tensor = single("send", "tensors", tensors);
  if (selfSend(tensor, destination, true)) {
    return nullptr;
  }
  const auto comm = routeMessage("send", tensor, destination);
  return issue(
      comm, /*async=*/true, [&] { return collectives::send(*comm, {}, tensor, destination, tag); });
}

Backend::WorkPtr Backend::recv(TensorList& tensors, int source, int tag) {
  const auto& tensor = single("recv", "tensors", tensors);
  if (selfSend(tensor, source, false)) {
    return nullptr;
  }
  const auto comm = routeMessage("recv", tensor, source);
  return issue(
      comm, /*async=*/true, [&] { return collectives::recv(*comm, {}, tensor, source, tag); });
}

Backend::WorkPtr Backend::recvAnysource(TensorList& tensors, int tag) {
  return recv(tensors, kAnyPeer, tag);
}

bool Backend::selfSend(const at::Tensor& tensor, int peer, bool sends) {
  if (peer != getRank() || !tensor.defined() || tensor.is_cpu()) {
    return false;
  }
  LockGuard batchLock(batchMutex_);
  LockGuard lock(communicatorsMutex_);
  // A batch that has kept one such message keeps the later ones, too: another message may have made
  // the communicator in between.
  const bool connected = find(tensor.device(), std::nullopt) != nullptr;
  const auto batch = batches_.find(threadLife());
  if (batch == batches_.end() || (connected && batch->second.empty())) {
    return false;
  }
  auto& kept = batch->second;
  (sends ? kept.sent : kept.received).push_back(tensor);
  kept.streams.push_back(currentStream(tensor.device()));
  return true;
}

void Backend::checkSelfSend(const SelfSend& kept) const {
  const auto elements = [](const TensorList& tensors) {
    std::vector<Elements> all;
    for (const auto& tensor : tensors) {
      all.push_back({tensor.numel(), tensor.scalar_type()});
    }
    return all;
  };
  checkSelfMessages(getRank(), elements(kept.sent), elements(kept.received));
}

Backend::WorkPtr Backend::copySelfSend(const SelfSend& kept) const {
  if (kept.empty()) {
    return nullptr;
  }
  const auto device = kept.received.front().device();
  const auto others = joinCurrentStream(device, kept.streams);
  at::AutoDispatchBelowAutograd guard;
  for (size_t i = 0; i < kept.sent.size(); ++i) {
    const auto& from = kept.sent[i];
    const auto& to = kept.received[i];
    to.copy_(from.reshape(to.sizes()), /*non_blocking=*/true);
  }
  for (const auto& other : others) {
    orderStreams(currentStream(device), other);
  }
  return c10::make_intrusive<QueuedWork>(kept.received);
}

void Backend::startCoalescing() {
  if (!process_.isThis()) {
    return;  // in a forked child operations raise, and an abort has nothing to do
  }
  // torch wraps the abort of a group in a coalescing context, even if the group has no
  // communicator.
  {
    ByThread<SelfSend> ended;  // its tensors are freed after the lock is released
    LockGuard lock(batchMutex_);
    for (auto it = batches_.begin(); it != batches_.end();) {
      const auto entry = it++;
      if (entry->first.expired()) {
        ended.insert(batches_.extract(entry));
      }
    }
    // Drops the thread's former batch, which an exception has left open.
    if (auto left = batches_.extract(threadLife())) {
      ended.insert(std::move(left));
    }
    batches_.try_emplace(threadLife());
  }
  for (const auto& comm : communicators()) {
    comm->batches().start();
  }
}

Backend::SelfSend Backend::endBatch() {
  if (!process_.isThis()) {
    return {};
  }
  LockGuard lock(batchMutex_);
  auto ended = batches_.extract(threadLife());
  return ended.empty() ? SelfSend() : std::move(ended.mapped());
}

void Backend::dropBatches() {
  endBatch();
  for (const auto& comm : communicators()) {
    comm->batches().drop();
  }
}

Backend::WorkPtr Backend::endCoalescing() {
  const auto kept = endBatch();
  WorkPtr work;
  try {
    checkSelfSend(kept);
    for (const auto& comm : communicators()) {
      comm->batches().check();
    }
    work = copySelfSend(kept);
    for (const auto& comm : communicators()) {
      if (!comm->batches().open() && comm->device() != at::kCPU) {
        continue;  // an operation that raised has dropped the batch
      }
      if (auto launched = comm->batches().end()) {
        if (work) {
          work->wait();  // only one Work is returned; for CPU tensors, the host waits
        }
        work = std::move(launched);
      }
    }
  } catch (...) {
    dropBatches();
    throw;
  }
  return work;
}

}  // namespace torchcomms_pg
