#include "hooks/NanCheck.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/sum.h>

#include "base/TorchCompat.hpp"
#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg {

namespace {

bool canHoldNan(const at::Tensor& tensor) {
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    return false;
  }
  return tensor.is_cpu() || !isCapturing(currentStream(tensor.device()));
}

// Widens types of one byte, for which torch has no check for NaN.
at::Tensor wide(const at::Tensor& tensor) {
  return tensor.element_size() == 1 ? tensor.to(at::kFloat) : tensor;
}

}  // namespace

void refuseNan(const PreHookArgs& args, int rank) {
  for (const auto& member : args.ops) {
    refuseNan(*member, rank);
  }
  // A batch is checked member by member, since some members only receive.
  const bool fromRoot = args.name == OpName::broadcast || args.name == OpName::scatter;
  if (!args.ops.empty() || (fromRoot && args.root != rank)) {
    return;
  }
  const at::NoGradGuard noGrad;
  for (size_t i = 0; i < args.inputs.size(); ++i) {
    const auto& tensor = args.inputs[i];
    if (!canHoldNan(tensor)) {
      continue;
    }
    const auto count = at::isnan(wide(tensor)).sum().item<int64_t>();
    TORCH_CHECK(
        count == 0, nameOf(args.name), " (op_id ", args.opId, ") on rank ", rank, ": input ", i,
        " of shape ", tensor.sizes(), " holds ", count, " NaN in ", tensor.numel(),
        " elements; it was not sent");
  }
}

}  // namespace torchcomms_pg
