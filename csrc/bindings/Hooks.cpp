// Python functions as hooks, and the hooks' arguments.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <ostream>
#include <string>

#include "base/NeverDestroyed.hpp"
#include "base/TextStreams.hpp"
#include "bindings/Bindings.hpp"
#include "hooks/Hooks.hpp"
#include "hooks/NanCheck.hpp"

namespace torchcomms_pg {

namespace {

// The Python class of a Work in a hook's arguments. Never destroyed, since hooks need it until the
// interpreter ends.
py::object& workClass = neverDestroyed<py::object>();

// A Python function that threads without the GIL may call and free.
class Function {
 public:
  explicit Function(py::function function)
      : function_(new py::function(std::move(function)), [](py::function* owned) {
          if (Py_IsInitialized() != 0) {  // otherwise the function ended with the interpreter
            py::gil_scoped_acquire gil;
            delete owned;
          }
        }) {}

  template <class... Args>
  void operator()(Args&&... args) const {
    py::gil_scoped_acquire gil;
    (*function_)(std::forward<Args>(args)...);
  }

  // Calls the function, and reports its exception as unraisable. For hooks that no caller awaits.
  template <class... Args>
  void callUnraisable(const char* what, Args&&... args) const {
    py::gil_scoped_acquire gil;
    try {
      (*function_)(std::forward<Args>(args)...);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable(what);
    }
  }

 private:
  std::shared_ptr<py::function> function_;
};

py::object oneOrList(const std::vector<at::Tensor>& tensors) {
  return tensors.size() == 1 ? py::cast(tensors.front()) : py::cast(tensors);
}

std::vector<at::Tensor> distinct(const PreHookArgs& args) {
  auto tensors = args.inputs;
  for (const auto& output : args.outputs) {
    const auto same = [&](const at::Tensor& input) { return output.is_same(input); };
    if (std::ranges::none_of(args.inputs, same)) {
      tensors.push_back(output);
    }
  }
  return tensors;
}

const char* pythonBool(bool value) {
  return value ? "True" : "False";
}

// Begins the text of a hook's arguments.
template <class Args>
void beginRepr(std::ostream& out, const char* type, const Args& args) {
  out << type << "(name=" << nameOf(args.name) << ", op_id=" << args.opId;
}

void addTensors(std::ostream& out, const char* what, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) {
    return;
  }
  out << ", " << what << "=[";
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    out << (i == 0 ? "" : ", ") << tensor.scalar_type() << tensor.sizes();
  }
  out << "] on " << tensors.front().device();
}

void addList(std::ostream& out, const char* what, const std::vector<int64_t>& values) {
  if (!values.empty()) {
    out << ", " << what << "=" << c10::IntArrayRef(values);
  }
}

std::string reprOf(const PreHookArgs& args) {
  TextWriter text;
  beginRepr(text, "PreHookArgs", args);
  text << ", async_op=" << pythonBool(args.async);
  addTensors(text, "inputs", args.inputs);
  addTensors(text, "outputs", args.outputs);
  if (args.root) {
    text << ", root=" << *args.root;
  }
  if (args.peer) {
    text << ", peer=" << *args.peer;
  }
  if (!args.reduceOp.empty()) {
    text << ", reduce_op='" << args.reduceOp << "'";
  }
  addList(text, "input_split_sizes", args.inputSplits);
  addList(text, "output_split_sizes", args.outputSplits);
  if (!args.ops.empty()) {
    text << ", num_ops=" << args.ops.size();
  }
  addList(text, "ranks", args.ranks);
  if (!args.newName.empty()) {
    text << ", new_name='" << args.newName << "'";
  }
  text << ")";
  return text.str();
}

std::string pythonRepr(const py::object& object) {
  return py::repr(object).cast<std::string>();
}

double millisecondsOf(const EndHookArgs& args) {
  return std::chrono::duration<double, std::milli>(args.duration).count();
}

const char* statusOf(const EndHookArgs& args) {
  return args.error ? "failed" : "completed";
}

std::string reprOf(const EndHookArgs& args) {
  TextWriter text;
  beginRepr(text, "EndHookArgs", args);
  text << ", async_op=" << pythonBool(args.async) << ", status='" << statusOf(args)
       << "', duration=" << millisecondsOf(args) << " ms";
  if (args.error) {
    text << ", error=" << pythonRepr(pythonError(args.error));
  }
  text << ")";
  return text.str();
}

py::object workOf(PostHookArgs& args) {
  if (!args.work && args.finished) {
    args.work = args.finished();
  }
  return args.work ? workClass(args.work) : py::none();
}

std::string reprOf(PostHookArgs& args) {
  TextWriter text;
  beginRepr(text, "PostHookArgs", args);
  text << ", work=" << pythonRepr(workOf(args));
  if (args.error) {
    text << ", error=" << pythonRepr(pythonError(args.error));
  }
  text << ")";
  return text.str();
}

constexpr const char* kNameDoc = "OpName: the operation.";
constexpr const char* kOpIdDoc =
    "int: the number of the operation, from 1. Counts the hooked operations of this process; the "
    "pre, post and end hooks of one operation have it in common.";
constexpr const char* kAsyncDoc = "bool: as the caller passed it.";

void bindArgs(py::module_& module) {
  py::enum_<OpName> names(module, "OpName", "The operation that a hook is told of.");
#define TORCHCOMMS_PG_VALUE(name) names.value(#name, OpName::name);
  TORCHCOMMS_PG_OP_NAMES(TORCHCOMMS_PG_VALUE)
#undef TORCHCOMMS_PG_VALUE

  py::class_<PreHookArgs, std::shared_ptr<PreHookArgs>>(
      module, "PreHookArgs", "An operation that is about to be launched, as a pre hook gets it.")
      .def("__repr__", [](const PreHookArgs& self) { return reprOf(self); })
      .def_readonly("name", &PreHookArgs::name, kNameDoc)
      .def_readonly("op_id", &PreHookArgs::opId, kOpIdDoc)
      .def_readonly("async_op", &PreHookArgs::async, kAsyncDoc)
      .def_readonly(
          "inputs", &PreHookArgs::inputs,
          "list[torch.Tensor]: the tensors that it reads; what is contiguous in them is what is "
          "sent.")
      .def_readonly("outputs", &PreHookArgs::outputs, "list[torch.Tensor]: those that it writes.")
      .def_property_readonly(
          "input", [](const PreHookArgs& self) { return oneOrList(self.inputs); },
          "torch.Tensor or list[torch.Tensor]: the only tensor of `inputs`, or all of them if "
          "there is not exactly one.")
      .def_property_readonly(
          "output", [](const PreHookArgs& self) { return oneOrList(self.outputs); },
          "torch.Tensor or list[torch.Tensor]: the same for `outputs`.")
      .def_property_readonly(
          "tensors", &distinct, "list[torch.Tensor]: inputs and outputs, each once.")
      .def_property_readonly(
          "tensor",
          [](const PreHookArgs& self) -> std::optional<at::Tensor> {
            const auto tensors = distinct(self);
            return tensors.size() == 1 ? std::optional(tensors.front()) : std::nullopt;
          },
          "torch.Tensor or None: the only tensor of `tensors`, None if there is not exactly one.")
      .def_readonly(
          "root", &PreHookArgs::root, "int or None: the rank of a rooted collective's root.")
      .def_readonly(
          "peer", &PreHookArgs::peer,
          "int or None: the other rank of a message, put or signal; -1 for a receive from any.")
      .def_property_readonly(
          "reduce_op",
          [](const PreHookArgs& self) {
            return self.reduceOp.empty() ? std::nullopt : std::optional(self.reduceOp);
          },
          "str or None: such as 'SUM'; None if nothing is reduced.")
      .def_readonly(
          "input_split_sizes", &PreHookArgs::inputSplits,
          "list[int]: rows for each rank, of all_to_all_v_single; empty for others.")
      .def_readonly(
          "output_split_sizes", &PreHookArgs::outputSplits,
          "list[int]: rows from each rank, of all_to_all_v_single; empty for others.")
      .def_readonly(
          "ops", &PreHookArgs::ops,
          "list[PreHookArgs]: the members of a batch, with its op_id; empty for others.")
      .def_property_readonly(
          "num_ops", [](const PreHookArgs& self) { return self.ops.size(); },
          "int: the number of `ops`.")
      .def_readonly(
          "ranks", &PreHookArgs::ranks,
          "list[int]: the ranks of the communicator that a split or shrink makes, by their numbers "
          "in this one; empty for others, and if this rank is in none.")
      .def_readonly(
          "new_name", &PreHookArgs::newName,
          "str: the name of the communicator that a split or shrink makes; empty for others.");

  py::class_<PostHookArgs, std::shared_ptr<PostHookArgs>>(
      module, "PostHookArgs",
      "An operation that is over for its caller, as a post hook gets it: it has ended, was "
      "cancelled by a pre hook, or could not be launched.")
      .def("__repr__", [](PostHookArgs& self) { return reprOf(self); })
      .def_readonly("name", &PostHookArgs::name, kNameDoc)
      .def_readonly("op_id", &PostHookArgs::opId, kOpIdDoc)
      .def_property_readonly(
          "work", &workOf,
          "TorchWork or None: the operation, which has ended. None for a synchronous one that "
          "failed, for one that was cancelled, and for finalize.")
      .def_property_readonly(
          "error", [](const PostHookArgs& self) { return pythonError(self.error); },
          "BaseException or None: the error that it failed with.");

  py::class_<EndHookArgs, std::shared_ptr<EndHookArgs>>(
      module, "EndHookArgs", "An operation that has come to its end, as an end hook gets it.")
      .def("__repr__", [](const EndHookArgs& self) { return reprOf(self); })
      .def_readonly("name", &EndHookArgs::name, kNameDoc)
      .def_readonly("op_id", &EndHookArgs::opId, kOpIdDoc)
      .def_readonly("async_op", &EndHookArgs::async, kAsyncDoc)
      .def_property_readonly("status", &statusOf, "str: 'completed' or 'failed'.")
      .def_property_readonly(
          "error", [](const EndHookArgs& self) { return pythonError(self.error); },
          "BaseException or None: the error that it failed with.")
      .def_property_readonly(
          "duration", &millisecondsOf,
          "float: milliseconds from its start to its end; 0 if it was never started.");
}

// Python's handle of a registered hook, which can remove the hook. May outlive the communicator.
class Handle {
 public:
  Handle(std::shared_ptr<Hooks> hooks, Hooks::Id id) : hooks_(std::move(hooks)), id_(id) {}
  Handle(Handle&&) = default;
  ~Handle() {
    if (hooks_) {
      py::gil_scoped_release release;  // the last owner of `hooks_` waits for running hooks
      hooks_ = nullptr;
    }
  }

  bool registered() const { return hooks_ != nullptr; }

  void remove() {
    if (auto hooks = std::exchange(hooks_, nullptr)) {
      py::gil_scoped_release release;  // a hook that runs meanwhile needs the GIL
      hooks->remove(id_);
      hooks = nullptr;  // this handle may be the last owner
    }
  }

 private:
  std::shared_ptr<Hooks> hooks_;
  const Hooks::Id id_;
};

template <class Hook>
Handle added(Comm& self, Hook hook) {
  const auto& hooks = self->hooks();
  return Handle(hooks, hooks->add(std::move(hook)));
}

}  // namespace

void bindHooks(py::module_& module) {
  bindArgs(module);
  module.def(
      "set_work_type", [](py::object type) { workClass = std::move(type); }, py::arg("type"));

  module.def(
      "refuse_nan", &refuseNan, py::arg("args"), py::arg("rank"),
      py::call_guard<py::gil_scoped_release>());

  py::class_<Handle>(
      module, "RemovableHandle", "A registered hook; every `register_..._hook` returns one.")
      .def(
          "__repr__",
          [](const Handle& self) {
            return self.registered() ? "RemovableHandle(registered)" : "RemovableHandle(removed)";
          })
      .def(
          "remove", &Handle::remove,
          "Ends the calls of the hook, from the next operation on. Idempotent; may be called when "
          "the communicator is gone.");

  py::class_<Comm>(module, "Communicator")
      .def(
          "register_pre_hook",
          [](Comm& self, py::function hook) {
            return added(self, Hooks::Pre(Function(std::move(hook))));
          },
          py::arg("hook"))
      .def(
          "register_post_hook",
          [](Comm& self, py::function hook) {
            return added(
                self, Hooks::Post([function = Function(std::move(hook))](
                                      const std::shared_ptr<PostHookArgs>& args) {
                  if (args->apart) {
                    function.callUnraisable("a post hook of torchcomms_pg", args);
                  } else {
                    function(args);
                  }
                }));
          },
          py::arg("hook"))
      .def(
          "register_end_hook",
          [](Comm& self, py::function hook) {
            self->enableTiming();
            return added(
                self, Hooks::End([function = Function(std::move(hook))](
                                     const std::shared_ptr<EndHookArgs>& args) {
                  function.callUnraisable("an end hook of torchcomms_pg", args);
                }));
          },
          py::arg("hook"))
      .def(
          "register_abort_hook",
          [](Comm& self, py::function hook) {
            const auto& hooks = self->hooks();
            return Handle(hooks, hooks->addAbort([function = Function(std::move(hook))] {
              function.callUnraisable("an abort hook of torchcomms_pg");
            }));
          },
          py::arg("hook"));
}

}  // namespace torchcomms_pg
