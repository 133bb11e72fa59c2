// Methods of the native communicator that issue its asynchronous operations on copies.
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/Bindings.hpp"
#include "bindings/LateWork.hpp"

namespace torchcomms_pg {

namespace {

using Tensors = std::vector<at::Tensor>;

// A method whose first arguments are tensors or nested lists of them, and whose last two are
// async_op and the timeout.
struct Method {
  std::string name;
  std::vector<bool> writes;       // whether it writes the argument; otherwise it only reads it
  std::optional<bool> rootReads;  // as in the gate's Roles; the root follows the tensors
  py::object original;
  c10::SafePyObject issued;
};

void appendTensors(py::handle value, Tensors& tensors) {
  if (THPVariable_Check(value.ptr())) {
    tensors.push_back(THPVariable_Unpack(value.ptr()));
  } else if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    for (const auto each : value) {
      appendTensors(each, tensors);
    }
  }
}

// Returns the value with the next tensors in place of its tensors.
py::object replaced(py::handle value, Tensors::const_iterator& next) {
  if (THPVariable_Check(value.ptr())) {
    return py::cast(*next++);
  }
  if (!py::isinstance<py::list>(value) && !py::isinstance<py::tuple>(value)) {
    return py::reinterpret_borrow<py::object>(value);
  }
  py::list list;
  for (const auto each : value) {
    list.append(replaced(each, next));
  }
  return list;
}

py::object callLate(const Method& method, const py::args& args) {
  const auto& comm = args[0].cast<Comm&>();
  const size_t tensors = method.writes.size();
  const bool flips =
      method.rootReads && (args[1 + tensors].cast<int>() == comm->rank()) == *method.rootReads;
  // In place, the second argument is the first.
  const bool inPlace = tensors == 2 && args[1].is(args[2]);
  Tensors outputs;
  Tensors inputs;
  const auto isWritten = [&](size_t position) { return method.writes[position] && !flips; };
  for (size_t i = 0; i < (inPlace ? 1 : tensors); ++i) {
    appendTensors(args[1 + i], isWritten(i) ? outputs : inputs);
  }
  const bool async = args[args.size() - 2].cast<bool>();
  static const std::string none;
  const auto group = "'" + comm->group().name + "'";
  auto issue = showCall(method.issued, {method.name, group, none, outputs, inputs, async});
  if (!issue) {
    return method.original(*args);
  }
  const auto call = [&](const Tensors& written, const Tensors& read) {
    const py::gil_scoped_acquire gil;
    auto nextWritten = written.begin();
    auto nextRead = read.begin();
    py::tuple late(args.size());
    for (size_t i = 0; i < args.size(); ++i) {
      const bool tensor = i >= 1 && i <= tensors;
      late[i] = !tensor             ? py::object(args[i])
                : i == 2 && inPlace ? py::object(late[1])
                                    : replaced(args[i], isWritten(i - 1) ? nextWritten : nextRead);
    }
    return method.original(*late).cast<C10dWork>();
  };
  C10dWork work;
  {
    const py::gil_scoped_release released;
    work = issueLate(std::move(*issue), std::move(outputs), std::move(inputs), call, args[0].ptr());
  }
  return py::cast(std::move(work));
}

}  // namespace

void bindLateMethods(py::module_& module) {
  module.def(
      "late_method",
      [](std::string name, std::vector<bool> writes, std::optional<bool> rootReads,
         py::object issued) -> py::object {
        const auto type = py::type::of<Comm>();
        Method method{
            name, std::move(writes), rootReads, type.attr(name.c_str()),
            c10::SafePyObject(issued.release().ptr(), getPyInterpreter())};
        return py::cpp_function(
            [method = std::move(method)](const py::args& args) { return callLate(method, args); },
            py::name(name.c_str()), py::is_method(type));
      },
      py::arg("name"), py::arg("writes"), py::arg("root_reads"), py::arg("issued"));
}

}  // namespace torchcomms_pg
