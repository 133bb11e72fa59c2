#include "comm/Batches.hpp"

#include <algorithm>
#include <utility>

#include "comm/Communicator.hpp"
#include "nccl/Fallbacks.hpp"

namespace torchcomms_pg {

Batches::Batch* Batches::find() {
  std::lock_guard lock(mutex_);
  const auto found = batches_.find(std::this_thread::get_id());
  return found == batches_.end() ? nullptr : &found->second;
}

WorkPtr Batches::add(PreparedOp& call) {
  auto* const batch = find();
  if (batch == nullptr) {
    return nullptr;
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
  // Works on a failed communicator, too: torch wraps the abort of groups in batches.
  PreparedOp call;
  call.op.kind = OpKind::coalesced;
  call.op.parts = parts;
  call.inputs = std::move(inputs);
  auto work = comm_.newWork(call);
  std::lock_guard lock(mutex_);
  // A batch that an exception between start and end left open was never launched, so it can be
  // dropped.
  const bool isNew =
      batches_.insert_or_assign(std::this_thread::get_id(), Batch{{}, std::move(work), scoped})
          .second;
  open_.fetch_add(isNew ? 1 : 0, std::memory_order_relaxed);
}

void Batches::drop() {
  if (open_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::lock_guard lock(mutex_);
  open_.fetch_sub(
      static_cast<int>(batches_.erase(std::this_thread::get_id())), std::memory_order_relaxed);
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
  return comm_.launch(merge(std::move(batch.calls)), batch.work);
}

PreparedOp Batches::merge(std::vector<PreparedOp> calls) const {
  if (calls.size() == 1) {
    return std::move(calls.front());
  }
  PreparedOp merged;
  merged.op = calls.front().op;
  merged.op.kind = OpKind::coalesced;
  merged.op.numelIn = merged.op.numelOut = 0;
  merged.op.peer = -1;
  bool epilogue = false;
  bool messages = true;
  for (auto& call : calls) {
    merged.op.async |= call.op.async;
    merged.op.ordered |= call.op.ordered;
    merged.op.timeout = std::max(merged.op.timeout, call.op.timeout);
    merged.op.numelIn += call.op.numelIn;
    merged.op.numelOut += call.op.numelOut;
    merged.inputs.insert(merged.inputs.end(), call.inputs.begin(), call.inputs.end());
    merged.outputs.insert(merged.outputs.end(), call.outputs.begin(), call.outputs.end());
    epilogue |= call.epilogue != nullptr;
    messages &= call.message.has_value();
  }
  merged.op.messages = messages;
  if (messages) {
    merged.parts = calls;
  }
  if (!merged.op.ordered) {
    return merged;
  }
  const auto shared = std::make_shared<std::vector<PreparedOp>>(std::move(calls));
  merged.members = shared;
  if (epilogue) {
    merged.epilogue = [shared] {
      for (auto& call : *shared) {
        if (call.epilogue) {
          call.epilogue();
        }
      }
    };
  }
  merged.launch = [&api = comm_.api(), shared](ncclComm_t comm, cudaStream_t stream) {
    return grouped(api, [&] {
      for (auto& call : *shared) {
        const auto result = call.launch(comm, stream);
        if (result != ncclSuccess) {
          return result;
        }
      }
      return ncclSuccess;
    });
  };
  return merged;
}

}  // namespace torchcomms_pg
