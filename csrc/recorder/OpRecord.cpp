#include "recorder/OpRecord.hpp"

#include <c10/util/thread_name.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <utility>

namespace torchcomms_pg {

namespace {

// Returns the length in bytes of the UTF-8 character at `place`, or 0 if the bytes are not valid.
size_t characterAt(const std::string& text, size_t place) {
  const auto byte = [&](size_t i) {
    return place + i < text.size() ? static_cast<unsigned char>(text[place + i]) : 0U;
  };
  const auto lead = byte(0);
  const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) {
      return 0;
    }
  }
  // Rejects overlong encodings, UTF-16 surrogates and code points beyond Unicode.
  const bool wrong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) >= 0xa0) ||
                     (lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) >= 0x90) ||
                     lead > 0xf4;
  return wrong ? 0 : length;
}

// Returns the text with U+FFFD in place of bytes that are not UTF-8, since readers of dumps reject
// such bytes.
std::string asUtf8(const std::string& text) {
  std::string valid;
  for (size_t i = 0; i < text.size();) {
    const auto length = characterAt(text, i);
    valid += length > 0 ? text.substr(i, length) : "\xef\xbf\xbd";
    i += length > 0 ? length : 1;
  }
  return valid;
}

const std::shared_ptr<const OpRecord::Thread>& thisThread() {
  static thread_local const auto thread = std::make_shared<const OpRecord::Thread>(
      OpRecord::Thread{.name = asUtf8(c10::getThreadName())});  // a system call, once per thread
  return thread;
}

}  // namespace

OpRecord::OpRecord(const Issue& issue, Stack pythonStack, bool withCppStack)
    : op(issue.op),
      seq(issue.seq),
      timeout(issue.timeout),
      peer(issue.peer),
      direction(issue.direction),
      details(issue.details),
      stack(std::move(pythonStack)),
      cppStack(
          withCppStack ? torch::CapturedTraceback::gather(
                             /*python=*/false, /*script=*/true, /*cpp=*/true)
                       : nullptr),
      thread(thisThread()),
      started(issue.started ? created : 0) {
  describe(issue.inputs, issue.join);
  inputs = tensors.size();
  describe(issue.outputs, issue.join);
}

void OpRecord::describe(const std::vector<at::Tensor>& described, bool join) {
  if (!described.empty()) {
    device = described.front().device().type();
  }
  if (!join || described.size() < 2) {
    for (const auto& tensor : described) {
      tensors.push_back({tensor.scalar_type(), static_cast<uint8_t>(tensor.dim())});
      sizes.append(tensor.sizes().begin(), tensor.sizes().end());
    }
    return;
  }
  const auto& first = described.front();
  const bool alike = std::all_of(described.begin(), described.end(), [&](const auto& tensor) {
    return tensor.sizes() == first.sizes();
  });
  if (alike) {
    tensors.push_back({first.scalar_type(), static_cast<uint8_t>(first.dim() + 1)});
    sizes.push_back(static_cast<int64_t>(described.size()));
    sizes.append(first.sizes().begin(), first.sizes().end());
  } else {
    int64_t total = 0;
    for (const auto& tensor : described) {
      total += tensor.numel();
    }
    tensors.push_back({first.scalar_type(), 1});
    sizes.push_back(total);
  }
}

bool OpRecord::start() {
  c10::time_t never = 0;
  return started.load(std::memory_order_relaxed) == never &&
         started.compare_exchange_strong(never, c10::getTime(), std::memory_order_relaxed);
}

void OpRecord::end(bool hasCompleted, float milliseconds) {
  if (hasCompleted) {
    start();
    duration.store(milliseconds, std::memory_order_relaxed);
    completed.store(c10::getTime(), std::memory_order_release);
  }
  retired.store(true, std::memory_order_release);
}

}  // namespace torchcomms_pg
