#include "bindings/LateWork.hpp"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "bindings/Bindings.hpp"

namespace torchcomms_pg {

LateWork::LateWork(
    c10::intrusive_ptr<c10d::Work> real,
    py::object delivery,
    std::vector<at::Tensor> results,
    std::vector<at::Tensor> outputs)
    : real_(std::move(real)),
      delivery_(std::move(delivery)),
      results_(std::move(results)),
      outputs_(std::move(outputs)) {}

LateWork::~LateWork() {
  if (Py_IsInitialized() == 0) {
    delivery_.release();
    return;
  }
  const py::gil_scoped_acquire gil;
  delivery_ = py::object();
}

bool LateWork::isCompleted() {
  const bool ended = real_->isCompleted();
  if (ended) {
    tell("ended", real_->isSuccess());
  }
  return ended;
}

std::vector<at::Tensor> LateWork::result() {
  std::vector<at::Tensor> value;
  endWith([&] { value = real_->result(); });
  return withOutputs(at::IValue(value)).toTensorVector();
}

void LateWork::synchronize() {
  endWith([&] { real_->synchronize(); });
}

bool LateWork::wait(std::chrono::milliseconds timeout) {
  tell("awaited", true);
  bool result = false;
  endWith([&] { result = real_->wait(timeout); });
  return result;
}

void LateWork::blockCurrentStream() {
  endWith([&] { real_->blockCurrentStream(); });
}

c10::intrusive_ptr<c10::ivalue::Future> LateWork::getFuture() {
  auto self = c10::intrusive_ptr<LateWork>::unsafe_reclaim_from_nonowning(this);
  const auto future = real_->getFuture();
  return future->then(
      [self = std::move(self)](c10::ivalue::Future& ended) {
        self->tell("complete", !ended.hasError());
        return self->withOutputs(ended.value());  // raises the operation's error
      },
      future->elementType());
}

c10::intrusive_ptr<c10::ivalue::Future> LateWork::getFutureResult() {
  auto self = c10::intrusive_ptr<LateWork>::unsafe_reclaim_from_nonowning(this);
  const auto future = real_->getFutureResult();
  return future->then(
      [self = std::move(self)](c10::ivalue::Future& ended) {
        self->tell("ended", self->isSuccess());
        return ended.value();
      },
      future->elementType());
}

void LateWork::endWith(const std::function<void()>& wait) const {
  try {
    wait();
  } catch (...) {
    tell("ended", false);
    throw;
  }
  tell("ended", true);
}

void LateWork::tell(const char* method, bool ok) const {
  const py::gil_scoped_acquire gil;
  delivery_.attr(method)(ok);
}

at::IValue LateWork::withOutputs(const at::IValue& value) const {
  if (!value.isTensorList()) {
    return value;
  }
  auto tensors = value.toTensorVector();
  for (auto& tensor : tensors) {
    const auto found = std::find_if(results_.begin(), results_.end(), [&](const at::Tensor& each) {
      return each.is_same(tensor);
    });
    if (found != results_.end()) {
      tensor = outputs_[static_cast<size_t>(found - results_.begin())];
    }
  }
  return tensors;
}

void bindLateWork(py::module_& module) {
  py::class_<LateWork, c10::intrusive_ptr<LateWork>, c10d::Work>(module, "LateWork")
      .def(
          py::init<
              c10::intrusive_ptr<c10d::Work>,
              py::object,
              std::vector<at::Tensor>,
              std::vector<at::Tensor>>(),
          py::arg("real"),
          py::arg("delivery"),
          py::arg("results"),
          py::arg("outputs"))
      .def_property_readonly("delivery", &LateWork::delivery);
}

}  // namespace torchcomms_pg
