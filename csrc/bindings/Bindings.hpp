// What the files with pybind11 share.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <utility>

#include "comm/Communicator.hpp"

namespace py = pybind11;

namespace torchcomms_pg {

// A communicator as Python holds it. Destroying one may join threads that need
// the GIL.
class Comm {
 public:
  explicit Comm(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {}
  ~Comm() {
    if (PyGILState_Check() != 0) {
      py::gil_scoped_release release;
      comm_.reset();
    }
  }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  Communicator& operator*() const { return *comm_; }
  Communicator* operator->() const { return comm_.get(); }

 private:
  std::shared_ptr<Communicator> comm_;
};

// The exception as a Python object, None for none. Needs the GIL.
py::object pythonError(const std::exception_ptr& error);

void bindErrors(py::module_& module);
void bindHooks(py::module_& module);
void bindCommunicator(py::module_& module);

}  // namespace torchcomms_pg
