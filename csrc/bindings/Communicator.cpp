// The communicator and its operations, for torchcomms_pg/comm.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "bindings/Bindings.hpp"
#include "collectives/Collectives.hpp"
#include "diagnosis/group/DiagnosisClient.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Timeout = std::optional<Milliseconds>;
using Result = c10::intrusive_ptr<c10d::Work>;

std::unique_ptr<Comm> split(
    Comm& self, const std::vector<int>& ranks, const std::string& name, Timeout timeout,
    const std::optional<NcclConfig>& config, bool named) {
  Group group;
  group.name = name;
  group.description = self->group().description;
  const auto& global = self->group().globalRanks;
  for (const int rank : ranks) {
    // Communicator::split refuses ranks that do not exist.
    const bool known = rank >= 0 && static_cast<size_t>(rank) < global.size();
    group.globalRanks.push_back(known ? global[rank] : rank);
  }
  auto child =
      self->split(ranks, std::move(group), timeout.value_or(self->timeout()), config, named);
  if (child == nullptr) {
    return nullptr;
  }
  child->failureState().setEndsProcess(self->failureState().endsProcess());
  return std::make_unique<Comm>(std::move(child));
}

void bindLife(py::class_<Comm>& comm) {
  comm.def_property_readonly("rank", [](Comm& self) { return self->rank(); })
      .def_property_readonly("size", [](Comm& self) { return self->size(); })
      .def_property_readonly("name", [](Comm& self) { return self->group().name; })
      .def_property_readonly("ranks", [](Comm& self) { return self->globalRanks(); })
      .def_property_readonly("device", [](Comm& self) { return self->device(); })
      .def_property_readonly(
          "library_version", [](Comm& self) { return versionText(self->api().version()); })
      .def_property(
          "timeout", [](Comm& self) { return self->timeout(); },
          [](Comm& self, Milliseconds timeout) { self->setTimeout(timeout); })
      .def_property_readonly(
          "failed", [](Comm& self) { return self->failureState().get() != nullptr; })
      .def_property_readonly(
          "ends_process", [](Comm& self) { return self->failureState().endsProcess(); })
      .def_property_readonly("splits", [](Comm& self) { return self->splits(); })
      .def("enable_timing", [](Comm& self) { self->enableTiming(); })
      .def(
          "split", &split, py::arg("ranks"), py::arg("name"), py::arg("timeout"), py::arg("config"),
          py::arg("named"), NoGil())
      .def(
          "comm_ptr",
          [](Comm& self) { return reinterpret_cast<int64_t>(self->joining().handle()); }, NoGil())
      .def(
          "enter_batch", [](Comm& self) { return self->batches().enter(); }, NoGil())
      .def(
          "leave_batch",
          [](Comm& self, std::optional<size_t> joined) -> Result {
            return self->batches().leave(joined);
          },
          py::arg("joined"), NoGil())
      .def(
          "cancel_batch",
          [](Comm& self, std::optional<size_t> joined) { self->batches().cancel(joined); },
          py::arg("joined"), NoGil())
      .def_property_readonly("in_batch", [](Comm& self) { return self->batches().open(); })
      .def(
          "abort", [](Comm& self, const std::string& why) { self->failureState().abort(why); },
          py::arg("why"), NoGil())
      .def("close", [](Comm& self) { self->close(); }, NoGil());
}

// Binds an operation as a method that takes the arguments `names`, then async_op and timeout.
template <class... Args, class... Names>
void bindOperation(
    py::class_<Comm>& comm, const char* name,
    WorkPtr (*operation)(Communicator&, const collectives::Options&, Args...), Names... names) {
  static_assert(sizeof...(Args) == sizeof...(Names));
  comm.def(
      name,
      [operation](Comm& self, Args... args, bool async, Timeout timeout) -> Result {
        return operation(*self, {.async = async, .timeout = timeout}, args...);
      },
      py::arg(names)..., py::arg("async_op"), py::arg("timeout"), NoGil());
}

void bindOperations(py::class_<Comm>& comm) {
  bindOperation(comm, "send", collectives::send, "tensor", "dst", "tag");
  bindOperation(comm, "recv", collectives::recv, "tensor", "src", "tag");
  bindOperation(comm, "broadcast", collectives::broadcast, "tensor", "root");
  bindOperation(comm, "all_reduce", collectives::allReduce, "output", "input", "op");
  bindOperation(comm, "reduce", collectives::reduce, "tensor", "root", "op");
  bindOperation(comm, "all_gather", collectives::allGather, "outputs", "input");
  bindOperation(comm, "all_gather_single", collectives::allGatherSingle, "output", "input");
  bindOperation(comm, "reduce_scatter", collectives::reduceScatter, "output", "inputs", "op");
  bindOperation(
      comm, "reduce_scatter_single", collectives::reduceScatterSingle, "output", "input", "op");
  bindOperation(
      comm, "all_to_all_single", collectives::allToAllSingle, "output", "input",
      "output_split_sizes", "input_split_sizes");
  bindOperation(comm, "all_to_all", collectives::allToAll, "outputs", "inputs");
  bindOperation(comm, "barrier", collectives::barrier);
  bindOperation(comm, "scatter", collectives::scatter, "output", "inputs", "root");
  bindOperation(comm, "gather", collectives::gather, "outputs", "input", "root");
  bindOperation(comm, "gather_single", collectives::gatherSingle, "output", "input", "root");
}

void bindLateness(py::module_& module, py::class_<Comm>& comm) {
  py::class_<RankLateness>(module, "_RankLateness")
      .def_readonly("later", &RankLateness::later)
      .def_readonly("share", &RankLateness::share);
  py::class_<Lateness>(module, "_Lateness")
      .def_readonly("ranks", &Lateness::ranks)
      .def_readonly("collectives", &Lateness::collectives)
      .def_readonly("seconds", &Lateness::seconds)
      .def_readonly("late", &Lateness::late);
  module.def("set_late_warning", &LatenessClient::setWarning, py::arg("on"));
  comm.def(
      "lateness",
      [](Comm& self, const char* operation) {
        return DiagnosisClient::of(self->observer()).lateness().ask(operation);
      },
      py::arg("operation"), NoGil());
}

}  // namespace

void bindCommunicator(py::module_& module) {
  py::class_<Comm> comm(module.attr("Communicator"));
  bindLife(comm);
  bindOperations(comm);
  bindLateness(module, comm);
}

}  // namespace torchcomms_pg
