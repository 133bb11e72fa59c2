#include "recorder/Record.hpp"

#include <c10/util/thread_name.h>

#include <algorithm>
#include <utility>

namespace torchcomms_pg {

namespace {

const std::shared_ptr<const Record::Thread>& thisThread() {
  static thread_local const auto thread = std::make_shared<const Record::Thread>(
      Record::Thread{.name = c10::getThreadName()});  // a system call
  return thread;
}

void describe(
    const std::vector<at::Tensor>& tensors,
    bool join,
    Record::Tensors& described,
    c10::SmallVector<int64_t, 8>& sizes) {
  auto& [dtypes, dims] = described;
  if (join && tensors.size() > 1) {
    const auto& first = tensors.front();
    dtypes.push_back(first.scalar_type());
    const bool alike = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      return tensor.sizes() == first.sizes();
    });
    if (alike) {
      dims.push_back(static_cast<uint8_t>(first.dim() + 1));
      sizes.push_back(static_cast<int64_t>(tensors.size()));
      sizes.append(first.sizes().begin(), first.sizes().end());
    } else {
      int64_t total = 0;
      for (const auto& tensor : tensors) {
        total += tensor.numel();
      }
      dims.push_back(1);
      sizes.push_back(total);
    }
    return;
  }
  for (const auto& tensor : tensors) {
    dtypes.push_back(tensor.scalar_type());
    dims.push_back(static_cast<uint8_t>(tensor.dim()));
    sizes.append(tensor.sizes().begin(), tensor.sizes().end());
  }
}

}  // namespace

Record::Record(const Issue& issue, Stack pythonStack, bool withCppStack)
    : op(issue.op),
      seq(issue.seq),
      timeout(issue.timeout),
      peer(issue.peer),
      direction(issue.direction),
      stack(std::move(pythonStack)),
      cppStack(
          withCppStack ? torch::CapturedTraceback::gather(
                             /*python=*/false, /*script=*/true, /*cpp=*/true)
                       : nullptr),
      thread(thisThread()),
      started(issue.started ? created : 0) {
  describe(issue.inputs, issue.join, inputs, sizes);
  describe(issue.outputs, issue.join, outputs, sizes);
}

bool Record::start() {
  c10::time_t never = 0;
  return started.load(std::memory_order_relaxed) == never &&
         started.compare_exchange_strong(never, c10::getTime(), std::memory_order_relaxed);
}

void Record::end(bool hasCompleted, float milliseconds) {
  if (hasCompleted) {
    start();
    duration.store(milliseconds, std::memory_order_relaxed);
    completed.store(c10::getTime(), std::memory_order_release);
  }
  retired.store(true, std::memory_order_release);
}

}  // namespace torchcomms_pg
