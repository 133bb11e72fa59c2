// Declarations shared by the files that use pybind11.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "comm/Communicator.hpp"
#include "connect/Connect.hpp"
#include "recorder/Stack.hpp"

namespace py = pybind11;

namespace torchcomms_pg {

// A Python object's reference to a communicator, or to an object that holds a communicator. Its
// destructor releases the GIL, since it may free the object, which joins threads that need the GIL.
template <class T>
class Held {
 public:
  explicit Held(std::shared_ptr<T> object) : object_(std::move(object)) {}
  ~Held() {
    if (PyGILState_Check() != 0) {
      py::gil_scoped_release release;
      object_.reset();
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  T& operator*() const { return *object_; }
  T* operator->() const { return object_.get(); }
  const std::shared_ptr<T>& shared() const { return object_; }

 private:
  std::shared_ptr<T> object_;
};

using Comm = Held<Communicator>;

// The same of a backend or a work. A work that outlives its communicator's Python object holds the
// last reference to the communicator.
template <class T>
class NoGilDestructor {
 public:
  NoGilDestructor() = default;
  explicit NoGilDestructor(T* object)
      : object_(c10::intrusive_ptr<T>::unsafe_steal_from_new(object)) {}
  explicit NoGilDestructor(c10::intrusive_ptr<T> object) : object_(std::move(object)) {}
  NoGilDestructor(const NoGilDestructor&) = default;
  NoGilDestructor(NoGilDestructor&&) noexcept = default;
  NoGilDestructor& operator=(const NoGilDestructor&) = default;
  NoGilDestructor& operator=(NoGilDestructor&&) noexcept = default;
  ~NoGilDestructor() {
    if (object_ && PyGILState_Check() != 0) {
      py::gil_scoped_release release;
      object_.reset();
    }
  }
  T* get() const { return object_.get(); }

 private:
  c10::intrusive_ptr<T> object_;
};

// Returns the exception as a Python object, or None if the pointer is null. Needs the GIL.
py::object pythonError(const std::exception_ptr& error);

// Returns a function that makes torch's ProcessGroupGloo through Python, since torch ships no
// header for the class. The function may be called without the GIL.
ConnectGloo glooConnector(const std::string& name, Milliseconds timeout);

void bindErrors(py::module_& module);
void bindWork(py::module_& module);
void bindLateFlights(py::module_& module);
void bindLateWork(py::module_& module);
void bindLateMethods(py::module_& module);
void bindOperatorGate(py::module_& module);
void bindInterrupts();
void bindHooks(py::module_& module);
void bindCommunicator(py::module_& module);
void bindWindows(py::module_& module);
void bindRecorder(py::module_& module);
void bindFrames(py::module_& module);
void bindPythonStackDump(py::module_& module);
void usePythonStacks(py::module_& module);
// Returns the code objects and instructions of a stack, the innermost first. Needs the GIL.
py::list callsOfStack(const Stack& stack);
void bindParting(py::module_& module);
void bindCreation(py::module_& module);
void bindWatch(py::module_& module);
void bindMetrics(py::module_& module);
void bindNccl(py::module_& module);
// Extends the class Backend: call it after Backend is bound.
void bindMemory(py::module_& module);

}  // namespace torchcomms_pg

PYBIND11_DECLARE_HOLDER_TYPE(T, torchcomms_pg::NoGilDestructor<T>, true)
