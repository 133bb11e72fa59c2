#include "backend/RegisteredMemory.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "comm/OpenCall.hpp"
#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg::ops {

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
  Operation op;
  op.kind = kind;
  op.issued = Clock::now();
  op.timeout = comm.timeout();
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

void registerMemory(
    Communicator& comm, Registrations::Pool pool, const std::vector<PoolSegment>& segments,
    bool symmetric) {
  const char* const what = name(OpKind::registerMemory);
  OpenCall::refuse(comm, what);
  need(comm, symmetric ? Feature::windowRegistration : Feature::registration, what);
  comm.library().refuseSuspended(comm.group().name);
  manage(comm, OpKind::registerMemory, [&](ncclComm_t handle) {
    for (const auto& segment : segments) {
      const auto result = comm.library().registrations().add(handle, pool, segment, symmetric);
      if (result != ncclSuccess) {
        return result;
      }
    }
    return ncclSuccess;
  });
}

bool deregisterMemory(Communicator& comm, Registrations::Pool pool) {
  OpenCall::refuse(comm, "deregister_mem_pool");
  const auto order = comm.library().holdOrder();
  const auto result = comm.library().registrations().remove(pool);
  TORCH_CHECK(
      result.value_or(ncclSuccess) == ncclSuccess, "deregister_mem_pool: group '",
      comm.group().name, "': ", comm.api().getErrorString(*result));
  return result.has_value();
}

void suspend(Communicator& comm) {
  OpenCall::refuse(comm, name(OpKind::suspend));
  need(comm, Feature::suspend, "suspend");
  TORCH_CHECK(
      comm.library().setSuspended(true), "suspend: group '", comm.group().name,
      "' is suspended already; call resume() first");
  try {
    comm.drain();
    manage(comm, OpKind::suspend, [&](ncclComm_t handle) {
      return comm.api().commSuspend(handle, NCCL_SUSPEND_MEM);
    });
  } catch (...) {
    comm.library().setSuspended(false);
    throw;
  }
}

void resume(Communicator& comm) {
  OpenCall::refuse(comm, name(OpKind::resume));
  need(comm, Feature::resume, "resume");
  TORCH_CHECK(
      comm.library().suspended(), "resume: group '", comm.group().name,
      "' is not suspended; suspend() comes before");
  manage(comm, OpKind::resume, [&](ncclComm_t handle) { return comm.api().commResume(handle); });
  comm.library().setSuspended(false);
}

std::unordered_map<std::string, uint64_t> memoryStats(Communicator& comm) {
  OpenCall::refuse(comm, "memory_stats");
  need(comm, Feature::memoryStats, "memory_stats");
  static constexpr std::pair<const char*, ncclCommMemStat_t> kStats[] = {
      {"suspend", ncclStatGpuMemSuspend},
      {"suspended", ncclStatGpuMemSuspended},
      {"persist", ncclStatGpuMemPersist},
      {"total", ncclStatGpuMemTotal}};
  comm.joining().awaitInitialization();
  const auto order = comm.library().holdOrder();
  auto* const handle = comm.joining().usable();
  std::unordered_map<std::string, uint64_t> stats;
  for (const auto& [key, stat] : kStats) {
    const auto result = comm.api().commMemStats(handle, stat, &stats[key]);
    TORCH_CHECK(
        result == ncclSuccess, "memory_stats: group '", comm.group().name,
        "': ", comm.api().getErrorString(result), " (", comm.api().getLastError(handle), ")");
  }
  return stats;
}

}  // namespace torchcomms_pg::ops
