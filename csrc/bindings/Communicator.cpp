// The communicator and its operations, for torchcomms_pg/comm.py.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "bindings/Bindings.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Timeout = std::optional<Milliseconds>;
using Tensors = std::vector<at::Tensor>;
using Result = c10::intrusive_ptr<c10d::Work>;
using Op = c10d::ReduceOp;
using Splits = std::vector<int64_t>;

Communicator::Options options(bool async, Timeout timeout) {
  return {.async = async, .timeout = timeout};
}

std::unique_ptr<Comm> split(
    Comm& self,
    const std::vector<int>& ranks,
    const std::string& name,
    Timeout timeout,
    const std::optional<NcclConfig>& config,
    bool named) {
  Group group;
  group.name = name;
  group.description = self->group().description;
  const auto& global = self->group().globalRanks;
  for (const int rank : ranks) {
    // Ranks that do not exist are refused by Communicator::split.
    const bool known = rank >= 0 && static_cast<size_t>(rank) < global.size();
    group.globalRanks.push_back(known ? global[rank] : rank);
  }
  auto child =
      self->split(ranks, std::move(group), timeout.value_or(self->timeout()), config, named);
  if (child == nullptr) {
    return nullptr;
  }
  child->setEndsProcess(self->endsProcess());
  return std::make_unique<Comm>(std::move(child));
}

std::vector<int64_t> globalRanks(const Comm& self) {
  auto ranks = self->group().globalRanks;
  for (int rank = static_cast<int>(ranks.size()); rank < self->size(); ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

void bindLife(py::class_<Comm>& comm) {
  comm.def_property_readonly("rank", [](Comm& self) { return self->rank(); })
      .def_property_readonly("size", [](Comm& self) { return self->size(); })
      .def_property_readonly("name", [](Comm& self) { return self->group().name; })
      .def_property_readonly("ranks", &globalRanks)
      .def_property_readonly("device", [](Comm& self) { return self->device(); })
      .def_property_readonly(
          "library_version", [](Comm& self) { return versionText(self->libraryVersion()); })
      .def_property(
          "timeout",
          [](Comm& self) { return self->timeout(); },
          [](Comm& self, Milliseconds timeout) { self->setTimeout(timeout); })
      .def_property_readonly("failed", [](Comm& self) { return self->failure() != nullptr; })
      .def_property_readonly("ends_process", [](Comm& self) { return self->endsProcess(); })
      .def("enable_timing", [](Comm& self) { self->enableTiming(); })
      .def(
          "split",
          &split,
          py::arg("ranks"),
          py::arg("name"),
          py::arg("timeout"),
          py::arg("config"),
          py::arg("named"),
          NoGil())
      .def(
          "comm_ptr", [](Comm& self) { return reinterpret_cast<int64_t>(self->handle()); }, NoGil())
      .def(
          "start_batch", [](Comm& self) { self->startBatch(); }, NoGil())
      .def(
          "end_batch", [](Comm& self) -> Result { return self->endBatch(); }, NoGil())
      .def(
          "drop_batch", [](Comm& self) { self->dropBatch(); }, NoGil())
      .def(
          "abort",
          [](Comm& self, const std::string& why) { self->abort(why); },
          py::arg("why"),
          NoGil())
      .def("close", [](Comm& self) { self->close(); }, NoGil());
}

void bindOperations(py::class_<Comm>& comm) {
  comm.def(
          "send",
          [](Comm& self, const at::Tensor& tensor, int dst, int tag, bool async, Timeout timeout)
              -> Result { return self->send(tensor, dst, tag, options(async, timeout)); },
          py::arg("tensor"),
          py::arg("dst"),
          py::arg("tag"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "recv",
          [](Comm& self, const at::Tensor& tensor, int src, int tag, bool async, Timeout timeout)
              -> Result { return self->recv(tensor, src, tag, options(async, timeout)); },
          py::arg("tensor"),
          py::arg("src"),
          py::arg("tag"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "broadcast",
          [](Comm& self, const at::Tensor& tensor, int root, bool async, Timeout timeout)
              -> Result { return self->broadcast(tensor, root, options(async, timeout)); },
          py::arg("tensor"),
          py::arg("root"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "all_reduce",
          [](Comm& self,
             const at::Tensor& output,
             const at::Tensor& input,
             const Op& op,
             bool async,
             Timeout timeout) -> Result {
            return self->allReduce(output, input, op, options(async, timeout));
          },
          py::arg("output"),
          py::arg("input"),
          py::arg("op"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "reduce",
          [](Comm& self,
             const at::Tensor& tensor,
             int root,
             const Op& op,
             bool async,
             Timeout timeout) -> Result {
            return self->reduce(tensor, root, op, options(async, timeout));
          },
          py::arg("tensor"),
          py::arg("root"),
          py::arg("op"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "all_gather",
          [](Comm& self,
             const Tensors& outputs,
             const at::Tensor& input,
             bool async,
             Timeout timeout) -> Result {
            return self->allGather(outputs, input, options(async, timeout));
          },
          py::arg("outputs"),
          py::arg("input"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "all_gather_single",
          [](Comm& self,
             const at::Tensor& output,
             const at::Tensor& input,
             bool async,
             Timeout timeout) -> Result {
            return self->allGatherSingle(output, input, options(async, timeout));
          },
          py::arg("output"),
          py::arg("input"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "reduce_scatter",
          [](Comm& self,
             const at::Tensor& output,
             const Tensors& inputs,
             const Op& op,
             bool async,
             Timeout timeout) -> Result {
            return self->reduceScatter(output, inputs, op, options(async, timeout));
          },
          py::arg("output"),
          py::arg("inputs"),
          py::arg("op"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "reduce_scatter_single",
          [](Comm& self,
             const at::Tensor& output,
             const at::Tensor& input,
             const Op& op,
             bool async,
             Timeout timeout) -> Result {
            return self->reduceScatterSingle(output, input, op, options(async, timeout));
          },
          py::arg("output"),
          py::arg("input"),
          py::arg("op"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "all_to_all_single",
          [](Comm& self,
             const at::Tensor& output,
             const at::Tensor& input,
             const Splits& outputSplits,
             const Splits& inputSplits,
             bool async,
             Timeout timeout) -> Result {
            return self->allToAllSingle(
                output, input, outputSplits, inputSplits, options(async, timeout));
          },
          py::arg("output"),
          py::arg("input"),
          py::arg("output_split_sizes"),
          py::arg("input_split_sizes"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "all_to_all",
          [](Comm& self, const Tensors& outputs, const Tensors& inputs, bool async, Timeout timeout)
              -> Result { return self->allToAll(outputs, inputs, options(async, timeout)); },
          py::arg("outputs"),
          py::arg("inputs"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "barrier",
          [](Comm& self, bool async, Timeout timeout) -> Result {
            return self->barrier(options(async, timeout));
          },
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "scatter",
          [](Comm& self,
             const at::Tensor& output,
             const Tensors& inputs,
             int root,
             bool async,
             Timeout timeout) -> Result {
            return self->scatter(output, inputs, root, options(async, timeout));
          },
          py::arg("output"),
          py::arg("inputs"),
          py::arg("root"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "gather",
          [](Comm& self,
             const Tensors& outputs,
             const at::Tensor& input,
             int root,
             bool async,
             Timeout timeout) -> Result {
            return self->gather(outputs, input, root, options(async, timeout));
          },
          py::arg("outputs"),
          py::arg("input"),
          py::arg("root"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil())
      .def(
          "gather_single",
          [](Comm& self,
             const std::optional<at::Tensor>& output,
             const at::Tensor& input,
             int root,
             bool async,
             Timeout timeout) -> Result {
            return self->gatherSingle(output, input, root, options(async, timeout));
          },
          py::arg("output"),
          py::arg("input"),
          py::arg("root"),
          py::arg("async_op"),
          py::arg("timeout"),
          NoGil());
}

}  // namespace

void bindCommunicator(py::module_& module) {
  py::class_<Comm> comm(module.attr("Communicator"));
  bindLife(comm);
  bindOperations(comm);
}

}  // namespace torchcomms_pg
