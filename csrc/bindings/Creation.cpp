// Creation of communicators, for torchcomms_pg/creation.py.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <numeric>
#include <utility>

#include "base/NeverDestroyed.hpp"
#include "base/StorePlace.hpp"
#include "bindings/Bindings.hpp"
#include "connect/Connect.hpp"
#include "operation/CommError.hpp"

namespace torchcomms_pg {

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

RendezvousInfo rendezvousInfo(
    const StorePtr& store, int rank, int size, const std::string& name, const char* backend,
    Milliseconds timeout) {
  RendezvousInfo info{store, rank, size, {}, name + "/" + std::to_string(size), timeout};
  info.group.name = name;
  info.group.description = backend;
  info.group.globalRanks.resize(size);
  std::iota(info.group.globalRanks.begin(), info.group.globalRanks.end(), 0);
  return info;
}

std::unique_ptr<Comm> own(std::shared_ptr<Communicator> comm, bool endsProcess) {
  comm->failureState().setEndsProcess(endsProcess);
  return std::make_unique<Comm>(std::move(comm));
}

std::unique_ptr<Comm> newHost(
    const StorePtr& store, int rank, int size, const std::string& name, Milliseconds timeout,
    bool endsProcess, bool gloo) {
  const auto info = rendezvousInfo(store, rank, size, name, gloo ? "gloo" : "shm", timeout);
  auto comm = gloo ? connectThroughGloo(info, glooConnector(name, timeout))
                   : connectHosts(info, /*gloo=*/nullptr);
  return own(std::move(comm), endsProcess);
}

std::unique_ptr<Comm> newAccelerator(
    const StorePtr& store, int rank, int size, const std::string& name, Milliseconds timeout,
    bool endsProcess, const at::Device& device, const std::string& path, const std::string& folder,
    bool highPriority, const NcclConfig& config, bool named, int ranksPerRoot) {
  const auto info = rendezvousInfo(store, rank, size, name, "nccl", timeout);
  const AcceleratorOptions options{
      .library = {.path = path, .folder = folder},
      .highPriority = highPriority,
      .config = config,
      .named = named,
      .ranksPerRoot = ranksPerRoot};
  return own(connect(info, device, options), endsProcess);
}

}  // namespace

ConnectGloo glooConnector(const std::string& name, Milliseconds timeout) {
  return [name, timeout](const StorePtr& store, int rank, int size, bool acrossHosts) {
    py::gil_scoped_acquire gil;
    try {
      return py::module_::import("torchcomms_pg.gloo_connections")
          .attr("connect")(StorePlace(store).store, store, rank, size, timeout, acrossHosts)
          .cast<gloo::Connections>();
    } catch (const py::error_already_set& error) {
      const auto why = py::str(error.value()).cast<std::string>();
      if (error.matches(PyExc_OSError)) {
        throw gloo::NoAddress(why);
      }
      if (!error.matches(PyExc_RuntimeError)) {
        throw;
      }
      throw CommError(
          {.message = why,  // gloo::Link names the ranks
           .op = "init",
           .group = name});
    }
  };
}

void bindCreation(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def(
      "keep_store", [](StorePtr store) { neverDestroyed<StorePtr>(std::move(store)); },
      py::arg("store"));
  module.def(
      "new_host_communicator", &newHost, py::arg("store"), py::arg("rank"), py::arg("size"),
      py::arg("name"), py::arg("timeout"), py::arg("ends_process"), py::arg("gloo"), NoGil());
  module.def(
      "new_accelerator_communicator", &newAccelerator, py::arg("store"), py::arg("rank"),
      py::arg("size"), py::arg("name"), py::arg("timeout"), py::arg("ends_process"),
      py::arg("device"), py::arg("nccl_library"), py::arg("nccl_folder"), py::arg("high_priority"),
      py::arg("config"), py::arg("named"), py::arg("ranks_per_root"), NoGil());
  module.def(
      "use_host_streams",
      [](const std::string& type, const std::string& library) {
        useHostStreams(c10::Device(type).type(), library);
      },
      py::arg("device_type"), py::arg("library"));
}

}  // namespace torchcomms_pg
