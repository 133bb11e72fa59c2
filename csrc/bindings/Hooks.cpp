// Python functions as hooks, and their arguments.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>

#include "base/Leaked.hpp"
#include "bindings/Bindings.hpp"
#include "comm/Hooks.hpp"
#include "comm/NanCheck.hpp"

namespace torchcomms_pg {

namespace {

// The Python class of a Work in a hook's arguments; see commErrorClass().
py::object& workClass() {
  static auto& type = leaked<py::object>();
  return type;
}

// A Python function that may be called and freed by threads without the GIL.
class Function {
 public:
  explicit Function(py::function function)
      : function_(new py::function(std::move(function)), [](py::function* owned) {
          if (Py_IsInitialized() != 0) {  // else it is gone with the interpreter
            py::gil_scoped_acquire gil;
            delete owned;
          }
        }) {}

  template <class... Args>
  void operator()(Args&&... args) const {
    py::gil_scoped_acquire gil;
    (*function_)(std::forward<Args>(args)...);
  }

  // Calls it for hooks whose exceptions no caller gets.
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
    bool seen = false;
    for (const auto& input : args.inputs) {
      seen |= output.is_same(input);
    }
    if (!seen) {
      tensors.push_back(output);
    }
  }
  return tensors;
}

void bindArgs(py::module_& module) {
  py::enum_<OpName> names(module, "OpName");
#define TORCHCOMMS_PG_VALUE(name) names.value(#name, OpName::name);
  TORCHCOMMS_PG_OP_NAMES(TORCHCOMMS_PG_VALUE)
#undef TORCHCOMMS_PG_VALUE

  py::class_<PreHookArgs, std::shared_ptr<PreHookArgs>>(module, "PreHookArgs")
      .def_readonly("name", &PreHookArgs::name)
      .def_readonly("op_id", &PreHookArgs::opId)
      .def_readonly("async_op", &PreHookArgs::async)
      .def_readonly("inputs", &PreHookArgs::inputs)
      .def_readonly("outputs", &PreHookArgs::outputs)
      .def_property_readonly(
          "input", [](const PreHookArgs& self) { return oneOrList(self.inputs); })
      .def_property_readonly(
          "output", [](const PreHookArgs& self) { return oneOrList(self.outputs); })
      .def_property_readonly("tensors", &distinct)
      .def_property_readonly(
          "tensor",
          [](const PreHookArgs& self) -> std::optional<at::Tensor> {
            const auto tensors = distinct(self);
            return tensors.size() == 1 ? std::optional(tensors.front()) : std::nullopt;
          })
      .def_readonly("root", &PreHookArgs::root)
      .def_readonly("peer", &PreHookArgs::peer)
      .def_property_readonly(
          "reduce_op",
          [](const PreHookArgs& self) {
            return self.reduceOp.empty() ? std::nullopt : std::optional(self.reduceOp);
          })
      .def_readonly("input_split_sizes", &PreHookArgs::inputSplits)
      .def_readonly("output_split_sizes", &PreHookArgs::outputSplits)
      .def_readonly("ops", &PreHookArgs::ops)
      .def_property_readonly("num_ops", [](const PreHookArgs& self) { return self.ops.size(); })
      .def_readonly("ranks", &PreHookArgs::ranks)
      .def_readonly("new_name", &PreHookArgs::newName);

  py::class_<PostHookArgs, std::shared_ptr<PostHookArgs>>(module, "PostHookArgs")
      .def_readonly("name", &PostHookArgs::name)
      .def_readonly("op_id", &PostHookArgs::opId)
      .def_property_readonly(
          "work",
          [](PostHookArgs& self) -> py::object {
            if (!self.work && self.finished) {
              const auto& [comm, before, kind, seq] = *self.finished;
              self.work = comm->finishedWork(kind, before->outputs, seq);
            }
            return self.work ? workClass()(self.work) : py::none();
          })
      .def_property_readonly(
          "error", [](const PostHookArgs& self) { return pythonError(self.error); });

  py::class_<EndHookArgs, std::shared_ptr<EndHookArgs>>(module, "EndHookArgs")
      .def_readonly("name", &EndHookArgs::name)
      .def_readonly("op_id", &EndHookArgs::opId)
      .def_readonly("async_op", &EndHookArgs::async)
      .def_property_readonly(
          "status", [](const EndHookArgs& self) { return self.error ? "failed" : "completed"; })
      .def_property_readonly(
          "error", [](const EndHookArgs& self) { return pythonError(self.error); })
      .def_property_readonly("duration", [](const EndHookArgs& self) {
        return std::chrono::duration<double, std::milli>(self.duration).count();
      });
}

// A handle that removes one hook. Idempotent; usable when the communicator is gone.
class Handle {
 public:
  Handle(std::shared_ptr<Hooks> hooks, Hooks::Id id) : hooks_(std::move(hooks)), id_(id) {}
  Handle(Handle&&) = default;
  ~Handle() {
    if (hooks_) {
      py::gil_scoped_release release;  // the last owner waits for hooks that run
      hooks_ = nullptr;
    }
  }

  void remove() {
    if (const auto hooks = std::exchange(hooks_, nullptr)) {
      py::gil_scoped_release release;  // freeing a hook may wait for one that runs
      hooks->remove(id_);
    }
  }

 private:
  std::shared_ptr<Hooks> hooks_;
  const Hooks::Id id_;
};

}  // namespace

void bindHooks(py::module_& module) {
  bindArgs(module);
  module.def(
      "set_work_type", [](py::object type) { workClass() = std::move(type); }, py::arg("type"));

  module.def(
      "refuse_nan",
      &refuseNan,
      py::arg("args"),
      py::arg("rank"),
      py::call_guard<py::gil_scoped_release>());

  py::class_<Handle>(module, "RemovableHandle").def("remove", &Handle::remove);

  py::class_<Comm>(module, "Communicator")
      .def(
          "register_pre_hook",
          [](Comm& self, py::function hook) {
            const auto& hooks = self->hooks();
            return Handle(hooks, hooks->add(Hooks::Pre(Function(std::move(hook)))));
          },
          py::arg("hook"))
      .def(
          "register_post_hook",
          [](Comm& self, py::function hook) {
            const auto& hooks = self->hooks();
            return Handle(
                hooks,
                hooks->add(
                    Hooks::Post([function = Function(std::move(hook))](
                                    const std::shared_ptr<PostHookArgs>& args) {
                      if (args->apart) {
                        function.callUnraisable("a post hook of torchcomms_pg", args);
                      } else {
                        function(args);
                      }
                    })));
          },
          py::arg("hook"))
      .def(
          "register_end_hook",
          [](Comm& self, py::function hook) {
            self->enableTiming();
            const auto& hooks = self->hooks();
            return Handle(
                hooks,
                hooks->add(
                    Hooks::End([function = Function(std::move(hook))](
                                   const std::shared_ptr<EndHookArgs>& args) {
                      function.callUnraisable("an end hook of torchcomms_pg", args);
                    })));
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
