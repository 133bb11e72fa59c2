// Operations that are collected and launched together.
#include <algorithm>
#include <utility>

#include "comm/Communicator.hpp"
#include "nccl/Fallbacks.hpp"

namespace torchcomms_pg {

Communicator::Batch* Communicator::openBatch() {
  std::lock_guard lock(batchMutex_);
  const auto found = batches_.find(std::this_thread::get_id());
  return found == batches_.end() ? nullptr : &found->second;
}

void Communicator::startBatch(OpKind parts, std::vector<at::Tensor> inputs) {
  // Also on a failed communicator: torch wraps the abort of groups in batches.
  Call call;
  call.op.kind = OpKind::coalesced;
  call.op.parts = parts;
  call.inputs = std::move(inputs);
  auto work = newWork(call);
  std::lock_guard lock(batchMutex_);
  // A batch that was left open, by an exception between start and end, was
  // never launched, so it can be forgotten.
  const bool isNew =
      batches_.insert_or_assign(std::this_thread::get_id(), Batch{{}, std::move(work)}).second;
  openBatches_.fetch_add(isNew ? 1 : 0, std::memory_order_relaxed);
}

void Communicator::dropBatch() {
  if (openBatches_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::lock_guard lock(batchMutex_);
  openBatches_.fetch_sub(
      static_cast<int>(batches_.erase(std::this_thread::get_id())), std::memory_order_relaxed);
}

WorkPtr Communicator::endBatch() {
  Batch batch;
  {
    std::lock_guard lock(batchMutex_);
    const auto found = batches_.find(std::this_thread::get_id());
    TORCH_CHECK(
        found != batches_.end(),
        "end_coalescing: no batch is open in this thread; it was never started, or an operation in "
        "it raised and it was dropped with nothing launched");
    batch = std::move(found->second);
    batches_.erase(found);
    openBatches_.fetch_sub(1, std::memory_order_relaxed);
  }
  if (batch.calls.empty()) {
    return nullptr;
  }
  return launch(merge(std::move(batch.calls)), batch.work);
}

Communicator::Call Communicator::merge(std::vector<Call> calls) {
  if (calls.size() == 1) {
    return std::move(calls.front());
  }
  Call merged;
  merged.op = calls.front().op;
  merged.op.kind = OpKind::coalesced;
  merged.op.numelIn = merged.op.numelOut = 0;
  merged.op.peer = -1;
  bool after = false;
  bool messages = true;
  for (auto& call : calls) {
    merged.op.async |= call.op.async;
    merged.op.ordered |= call.op.ordered;
    merged.op.timeout = std::max(merged.op.timeout, call.op.timeout);
    merged.op.numelIn += call.op.numelIn;
    merged.op.numelOut += call.op.numelOut;
    merged.inputs.insert(merged.inputs.end(), call.inputs.begin(), call.inputs.end());
    merged.outputs.insert(merged.outputs.end(), call.outputs.begin(), call.outputs.end());
    after |= call.after != nullptr;
    messages &= call.message.has_value();
  }
  if (messages) {
    merged.parts = calls;
  }
  if (!merged.op.ordered) {
    return merged;
  }
  const auto shared = std::make_shared<std::vector<Call>>(std::move(calls));
  merged.members = shared;
  if (after) {
    merged.after = [shared] {
      for (auto& call : *shared) {
        if (call.after) {
          call.after();
        }
      }
    };
  }
  merged.launch = [this, shared](ncclComm_t comm, cudaStream_t stream) {
    return grouped(api_, [&] {
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
