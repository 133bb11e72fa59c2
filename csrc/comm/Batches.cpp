#include "comm/Batches.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "comm/Identity.hpp"
#include "device/AcceleratorDevice.hpp"
#include "operation/Checks.hpp"

namespace torchcomms_pg {

Batches::Batch* Batches::find() {
  dropEnded();
  LockGuard lock(mutex_);
  const auto found = batches_.find(threadLife());
  return found == batches_.end() ? nullptr : &found->second;
}

void Batches::dropEnded() {
  if (!any()) {
    return;
  }
  std::vector<Batch> ended;  // warned about and freed after the lock is released
  {
    LockGuard lock(mutex_);
    for (auto it = batches_.begin(); it != batches_.end();) {
      if (!it->first.expired()) {
        ++it;
        continue;
      }
      ended.push_back(std::move(it->second));
      it = batches_.erase(it);
      open_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  for (const auto& batch : ended) {
    TORCH_WARN(
        "thread ", batch.thread, " has ended and left a batch open on group '", self_.group().name,
        "', which is dropped; operations in it, which have not run: ", batch.calls.size(),
        batch.calls.empty() ? "" : std::string(", first ") + name(batch.calls.front().op.kind),
        ". End a batch in the thread that starts it");
  }
}

WorkPtr Batches::add(PreparedOp& call) {
  auto* const batch = find();
  if (batch == nullptr) {
    return nullptr;
  }
  if (self_.device() != at::kCPU) {
    call.streams.push_back(currentStream(self_.device()));
  }
  batch->calls.push_back(std::move(call));
  return batch->work;
}

Batches::Batch& Batches::required() {
  auto* const batch = find();
  TORCH_CHECK(
      batch != nullptr,
      "end_coalescing: no batch is open in this thread; it was never started, or an operation in "
      "it raised and it was dropped with nothing launched");
  return *batch;
}

void Batches::start(OpKind parts, std::vector<at::Tensor> inputs) {
  const auto* const around = find();
  if (around == nullptr || !around->scoped) {
    open(parts, std::move(inputs), /*scoped=*/false);
  }
}

std::optional<size_t> Batches::enter() {
  if (const auto* const around = find()) {
    return around->calls.size();
  }
  open(OpKind::coalesced, {}, /*scoped=*/true);
  return std::nullopt;
}

void Batches::open(OpKind parts, std::vector<at::Tensor> inputs, bool scoped) {
  // Must not raise on a failed communicator: torch aborts groups in a coalescing context.
  PreparedOp call;
  call.op.kind = OpKind::coalesced;
  call.op.parts = parts;
  call.inputs = std::move(inputs);
  auto work = launcher_.newWork(call);
  LockGuard lock(mutex_);
  // Replaces a batch that an exception between start() and end() left open and not launched.
  const bool isNew =
      batches_.insert_or_assign(threadLife(), Batch{{}, std::move(work), scoped, gettid()}).second;
  open_.fetch_add(isNew ? 1 : 0, std::memory_order_relaxed);
}

void Batches::drop() {
  if (!any()) {
    return;
  }
  LockGuard lock(mutex_);
  const auto found = batches_.find(threadLife());
  if (found != batches_.end()) {
    batches_.erase(found);
    open_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void Batches::cancel(std::optional<size_t> joined) {
  if (!joined) {
    drop();
  } else if (auto* const batch = find()) {
    batch->calls.resize(std::min(*joined, batch->calls.size()));
  }
}

WorkPtr Batches::end() {
  return required().scoped ? nullptr : launch();
}

WorkPtr Batches::leave(std::optional<size_t> joined) {
  return joined ? required().work : launch();
}

WorkPtr Batches::launch() {
  Batch batch = std::move(required());
  drop();
  if (batch.calls.empty()) {
    return nullptr;
  }
  check(batch.calls);
  auto merged = merge(std::move(batch.calls));
  if (!merged.streams.empty()) {
    merged.streams = joinCurrentStream(self_.device(), merged.streams);
  }
  return launcher_.launch(std::move(merged), batch.work);
}

void Batches::check() {
  const auto* const batch = find();
  if (batch != nullptr && !batch->scoped) {
    check(batch->calls);
  }
}

void Batches::check(const std::vector<PreparedOp>& calls) const {
  if (self_.device() == at::kCPU) {
    return;  // the library checks messages of a rank to itself
  }
  std::vector<Elements> sent;
  std::vector<Elements> received;
  for (const auto& call : calls) {
    if (!call.isMessage() || call.op.peer != self_.rank()) {
      continue;
    }
    if (call.op.kind == OpKind::send) {
      sent.push_back({call.op.numelIn, call.op.dtype});
    } else {
      received.push_back({call.op.numelOut, call.op.dtype});
    }
  }
  checkSelfMessages(self_.rank(), sent, received);
}

PreparedOp Batches::merge(std::vector<PreparedOp> calls) const {
  if (calls.size() == 1) {
    calls.front().op.batched = true;
    return std::move(calls.front());
  }
  PreparedOp merged;
  merged.op = calls.front().op;
  merged.op.kind = OpKind::coalesced;
  merged.op.numelIn = merged.op.numelOut = merged.op.bytes = 0;
  merged.op.peer = -1;
  const auto kind = calls.front().op.kind;
  const bool alike =
      std::ranges::all_of(calls, [&](const PreparedOp& call) { return call.op.kind == kind; });
  merged.op.parts = alike ? kind : OpKind::coalesced;
  bool epilogue = false;
  bool messages = true;
  for (auto& call : calls) {
    merged.op.async |= call.op.async;
    merged.op.ordered |= call.op.ordered;
    merged.op.timeout = std::max(merged.op.timeout, call.op.timeout);
    merged.op.numelIn += call.op.numelIn;
    merged.op.numelOut += call.op.numelOut;
    merged.op.bytes += call.op.bytes;
    merged.inputs.insert(merged.inputs.end(), call.inputs.begin(), call.inputs.end());
    merged.outputs.insert(merged.outputs.end(), call.outputs.begin(), call.outputs.end());
    merged.copies.insert(merged.copies.end(), call.copies.begin(), call.copies.end());
    merged.streams.insert(merged.streams.end(), call.streams.begin(), call.streams.end());
    epilogue |= call.epilogue != nullptr;
    messages &= call.isMessage();
  }
  if (!merged.op.ordered) {  // all are messages
    merged.parts = std::move(calls);
    return merged;
  }
  if (messages) {
    merged.parts = calls;
  }
  const auto shared = std::make_shared<std::vector<PreparedOp>>(std::move(calls));
  merged.members = shared;
  if (epilogue) {
    merged.epilogue = [shared] {
      for (auto& call : *shared) {
        runEpilogue(call.epilogue);
      }
    };
  }
  merged.task = [&api = api_, shared](ncclComm_t comm, cudaStream_t stream) {
    return api.grouped(
        *shared, [&](const PreparedOp& call) { return call.launch(api, comm, stream); });
  };
  return merged;
}

}  // namespace torchcomms_pg
