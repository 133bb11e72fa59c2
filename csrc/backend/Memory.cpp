// Memory of the group's accelerators: tensors' memory registered with NCCL, and NCCL's own memory.
// All functions but deregisterPool() raise NotImplementedError if the library lacks what they call.
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "backend/Backend.hpp"
#include "comm/OpenCall.hpp"

namespace torchcomms_pg {

namespace {

void need(const Communicator& comm, Feature feature, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      comm.api().has(feature), what, ": the loaded library has no ", introduced(feature).functions,
      ", which came with NCCL ", introduced(feature).version,
      "; python -m torchcomms_pg.nccl tells which one is loaded");
}

// Calls a function of the library that is not launched into a stream, but has a deadline. May wait
// for other ranks.
void manage(
    Communicator& comm, OpKind kind, const std::function<ncclResult_t(ncclComm_t comm)>& body) {
  TORCH_CHECK(
      !comm.batches().open(), name(kind),
      ": cannot be part of a group of operations; call it before");
  comm.joining().usable();
  const Operation op{.kind = kind, .timeout = comm.timeout(), .issued = Clock::now()};
  const OpenCall open(comm, &op);  // left after the operation: a handler may have ended the group
  const auto entry = comm.inFlight().add(op);
  // Without end(): `op` has no number in the group.
  const auto removal = c10::make_scope_exit([&] { comm.inFlight().remove(entry); });
  comm.joining().awaitInitialization(op);
  const c10::DeviceGuard onDevice(comm.device());
  const auto order = comm.library().holdOrder();
  const auto result = body(comm.joining().usable());
  if (result != ncclSuccess) {
    std::rethrow_exception(comm.failureState().error(op, result));
  }
}

}  // namespace

std::vector<Backend::CommPtr> Backend::accelerators(const char* what) const {
  std::vector<CommPtr> found;
  {
    LockGuard lock(communicatorsMutex_);
    found = accelerators_;
  }
  TORCH_CHECK(
      !found.empty(), what, ": group '", options_->group_name,
      "' has no connections for an accelerator, and so no memory "
      "there; run one of its operations "
      "first, or pass device_id to init_process_group");
  for (const auto& comm : found) {
    OpenCall::refuse(*comm, what);
  }
  return found;
}

void Backend::registerPool(
    Registrations::Pool pool, const std::map<int, std::vector<PoolSegment>>& segments,
    bool symmetric) {
  const char* const what = name(OpKind::registerMemory);
  const auto type = at::getAccelerator(/*checked=*/true).value();
  for (const auto& [index, ofDevice] : segments) {
    const auto comm = communicator(what, {type, static_cast<at::DeviceIndex>(index)});
    OpenCall::refuse(*comm, what);
    need(*comm, symmetric ? Feature::windowRegistration : Feature::registration, what);
    comm->library().refuseSuspended(comm->group().name);
    manage(*comm, OpKind::registerMemory, [&, &added = ofDevice](ncclComm_t handle) {
      auto result = ncclSuccess;
      for (size_t i = 0; i < added.size() && result == ncclSuccess; ++i) {
        result = comm->library().registrations().add(handle, pool, added[i], symmetric);
      }
      return result;
    });
  }
}

void Backend::deregisterPool(Registrations::Pool pool) {
  bool known = false;
  for (const auto& comm : communicators()) {
    OpenCall::refuse(*comm, "deregister_mem_pool");
    const auto order = comm->library().holdOrder();
    const auto result = comm->library().registrations().remove(pool);
    TORCH_CHECK(
        result.value_or(ncclSuccess) == ncclSuccess, "deregister_mem_pool: group '",
        comm->group().name, "': ", comm->api().getErrorString(*result));
    known |= result.has_value();
  }
  TORCH_CHECK_VALUE(
      known, "deregister_mem_pool: pool (", pool.first, ", ", pool.second,
      ") is not registered with group '", options_->group_name,
      "'; pass one that register_mem_pool has got");
}

void Backend::suspend() {
  for (const auto& comm : accelerators("suspend")) {
    need(*comm, Feature::suspend, "suspend");
    TORCH_CHECK(
        comm->library().setSuspended(true), "suspend: group '", comm->group().name,
        "' is suspended already; call resume() first");
    try {
      comm->drain();
      manage(*comm, OpKind::suspend, [&](ncclComm_t handle) {
        return comm->api().commSuspend(handle, NCCL_SUSPEND_MEM);
      });
    } catch (...) {
      comm->library().setSuspended(false);
      throw;
    }
  }
}

void Backend::resume() {
  for (const auto& comm : accelerators("resume")) {
    need(*comm, Feature::resume, "resume");
    TORCH_CHECK(
        comm->library().suspended(), "resume: group '", comm->group().name,
        "' is not suspended; suspend() comes before");
    manage(
        *comm, OpKind::resume, [&](ncclComm_t handle) { return comm->api().commResume(handle); });
    comm->library().setSuspended(false);
  }
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  static constexpr std::pair<const char*, ncclCommMemStat_t> kStats[] = {
      {"suspend", ncclStatGpuMemSuspend},
      {"suspended", ncclStatGpuMemSuspended},
      {"persist", ncclStatGpuMemPersist},
      {"total", ncclStatGpuMemTotal}};
  std::unordered_map<std::string, uint64_t> sums;
  for (const auto& comm : accelerators("memory_stats")) {
    need(*comm, Feature::memoryStats, "memory_stats");
    comm->joining().awaitInitialization();
    const auto order = comm->library().holdOrder();
    auto* const handle = comm->joining().usable();
    for (const auto& [key, stat] : kStats) {
      uint64_t value = 0;
      const auto result = comm->api().commMemStats(handle, stat, &value);
      TORCH_CHECK(
          result == ncclSuccess, "memory_stats: group '", comm->group().name,
          "': ", comm->api().getErrorString(result), " (", comm->api().getLastError(handle), ")");
      sums[key] += value;
    }
  }
  return sums;
}

}  // namespace torchcomms_pg
