// The work of an operation whose results a check hands over late.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace py = pybind11;

namespace torchcomms_pg {

// Stands for the work of an operation that runs on copies of the caller's tensors. Before a call
// tells its caller that the operation has ended, this class calls `delivery.ended(ok)`, which
// copies the results into the caller's tensors. Only torchcomms_pg/check_async makes objects of
// this class.
class LateWork final : public c10d::Work {
 public:
  // `results` are the tensors that the operation writes, `outputs` the caller's tensors for them.
  LateWork(
      c10::intrusive_ptr<c10d::Work> real,
      py::object delivery,
      std::vector<at::Tensor> results,
      std::vector<at::Tensor> outputs);
  ~LateWork() override;

  LateWork(const LateWork&) = delete;
  LateWork& operator=(const LateWork&) = delete;

  c10d::Work& real() const { return *real_; }
  const py::object& delivery() const { return delivery_; }

  bool isCompleted() override;
  bool isSuccess() const override { return real_->isSuccess(); }
  std::exception_ptr exception() const override { return real_->exception(); }
  int sourceRank() const override { return real_->sourceRank(); }
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override { real_->abort(); }
  // Returns a future that completes after the results have been handed over.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override { return real_->getDuration(); }
  uint64_t getSequencenumber() const override { return real_->getSequencenumber(); }

 private:
  // Runs `wait`, and then tells `delivery_` whether the operation has ended well.
  void endWith(const std::function<void()>& wait) const;
  void tell(const char* method, bool ok) const;
  // Returns the value of the operation's future, with the caller's tensors in it.
  at::IValue withOutputs(const at::IValue& value) const;

  const c10::intrusive_ptr<c10d::Work> real_;
  py::object delivery_;
  const std::vector<at::Tensor> results_;
  const std::vector<at::Tensor> outputs_;
};

}  // namespace torchcomms_pg
