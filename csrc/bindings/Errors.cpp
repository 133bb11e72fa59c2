// Failures as Python exceptions.
#include <pybind11/stl.h>

#include "base/NeverDestroyed.hpp"
#include "bindings/Bindings.hpp"
#include "operation/CommError.hpp"

namespace torchcomms_pg {

namespace {

// The Python class of CommError, which torchcomms_pg/errors.py makes. Null before set_comm_error.
// Never destroyed: it is needed until the interpreter ends.
py::object& commErrorClass = neverDestroyed<py::object>();

// Returns the text, with U+FFFD in place of bytes that are not UTF-8. The text may come from
// libraries and other processes, and a decoding error would hide the failure.
py::str readable(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

py::object commError(const CommError& error) {
  const auto& failure = error.failure();
  if (!commErrorClass) {
    throw error;  // torch converts a CommError to its DistBackendError
  }
  return commErrorClass(
      readable(failure.text()), py::arg("op") = failure.op, py::arg("seq") = failure.seq,
      py::arg("group") = readable(failure.group), py::arg("ranks") = failure.ranks,
      py::arg("verdict") = readable(failure.verdict.empty() ? failure.message : failure.verdict),
      py::arg("parting") = readable(failure.parting));
}

}  // namespace

py::object pythonError(const std::exception_ptr& error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
    return py::none();
  } catch (const CommError& failure) {
    return commError(failure);
  } catch (const py::error_already_set& raised) {
    return raised.value();
  } catch (const c10::Error& failure) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(
        readable(failure.what_without_backtrace()));
  } catch (const std::exception& failure) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(readable(failure.what()));
  }
}

void bindErrors(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(pointer);
      }
    } catch (const CommError& error) {
      const auto object = commError(error);
      PyErr_SetObject(py::type::handle_of(object).ptr(), object.ptr());
    }
  });
  module.def(
      "set_comm_error", [](py::object type) { commErrorClass = std::move(type); }, py::arg("type"));
}

}  // namespace torchcomms_pg
