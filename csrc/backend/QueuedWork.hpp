// The Work of operations that are queued in an accelerator's current stream without a communicator.
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <utility>
#include <vector>

#include "base/TorchCompat.hpp"

namespace torchcomms_pg {

// Waiting makes the current stream wait for what was queued when the Work was made.
class QueuedWork final : public c10d::Work {
 public:
  // `results`: at least one tensor, all on one device.
  explicit QueuedWork(std::vector<at::Tensor> results)
      : results_(std::move(results)),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(
                c10::ListType::create(c10::TensorType::get()),
                std::vector<at::Device>{results_.front().device()})) {
    future_->markCompleted(at::IValue(results_));
    finish();
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void synchronize() override { future_->wait(); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<at::Tensor> results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace torchcomms_pg
