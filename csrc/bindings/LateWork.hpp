// The work of an operation whose results a check hands over late.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/LateFlights.hpp"

namespace torchcomms_pg {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

// What an operation on copies needs at its end.
struct LatePart {
  std::shared_ptr<Delivery> delivery;
  std::vector<at::Tensor> results;  // that the operation writes
  std::vector<at::Tensor> outputs;  // the caller's tensors for them
};

// Stands for the work of an operation that runs on copies of the caller's tensors. Before a call
// tells its caller that the operation has ended, this class has the results copied into the
// caller's tensors. Only the check of asynchronous operations makes objects of this class.
class LateWork final : public c10d::Work {
 public:
  LateWork(C10dWork real, std::vector<LatePart> parts)
      : real_(std::move(real)), parts_(std::move(parts)) {}

  c10d::Work& real() const { return *real_; }
  const std::vector<LatePart>& parts() const { return parts_; }

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
  // Runs `wait`, and then tells the deliveries whether the operation has ended well.
  void endWith(const std::function<void()>& wait) const;
  void ended(bool ok) const;
  // Returns the value of the operation's future, with the caller's tensors in it.
  at::IValue withOutputs(const at::IValue& value) const;

  const C10dWork real_;
  const std::vector<LatePart> parts_;
};

// Issues an asynchronous operation on copies, and returns the work that ends late; null if `call`
// returns null. If the calling thread has opened a batch with the key, the operation is a part of
// the batch's work as well.
//
// `call` issues the operation, given the tensors to write and those to read.
using IssueCall =
    std::function<C10dWork(const std::vector<at::Tensor>&, const std::vector<at::Tensor>&)>;
C10dWork issueLate(
    c10::SafePyObject issue, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
    const IssueCall& call, const void* batch);

// A call of an operation.
struct LateCall {
  const std::string& name;  // in reports
  const std::string& group;
  const std::string& description;
  const std::vector<at::Tensor>& outputs;  // that it writes
  const std::vector<at::Tensor>& inputs;   // that it only reads
  bool async;
};
// Shows a call to `issued`, a callable of Python that makes the object for reports. Returns that
// object if the operation is to run on copies, else nullopt: a synchronous one is at most reported.
std::optional<c10::SafePyObject> showCall(const c10::SafePyObject& issued, const LateCall& call);

// Makes the issue's object of Python report the flights whose memory an operation takes. Returns
// whether there is such a flight.
bool overlaps(
    const c10::SafePyObject& issue, const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs);

}  // namespace torchcomms_pg
