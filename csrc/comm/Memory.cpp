// Memory: what is registered with a communicator, and what it has itself.
#include <c10/core/DeviceGuard.h>

#include <utility>

#include "comm/Communicator.hpp"
#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg {

namespace {

template <class Function>
void need(Function function, const char* what, const char* name, const char* since) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      function != nullptr,
      what,
      ": the loaded library has no ",
      name,
      ", which came with NCCL ",
      since,
      "; python -m torchcomms_pg.nccl tells which one is loaded");
}

}  // namespace

void Communicator::refuseSuspended() const {
  TORCH_CHECK(
      !C10_UNLIKELY(suspended_.load(std::memory_order_acquire)),
      "group '",
      group_.name,
      "' is suspended; call resume() on all of its ranks first");
}

// What is not launched into a stream, and still has a deadline.
void Communicator::manage(OpKind kind, const std::function<ncclResult_t(ncclComm_t comm)>& body) {
  TORCH_CHECK(!inBatch(), name(kind), ": cannot be part of a group of operations; call it before");
  usable();
  Operation op;
  op.kind = kind;
  op.issued = Clock::now();
  op.timeout = timeout();
  const auto entry = enter(op, nullptr);
  std::exception_ptr error;
  try {
    awaitInitialization();
    const c10::DeviceGuard onDevice(device());
    std::lock_guard lock(issueMutex_);
    const auto result = body(usable());
    if (result != ncclSuccess) {
      error = resultError(op, result);
    }
  } catch (...) {
    error = std::current_exception();
  }
  leave(entry, /*completed=*/false);  // has no place in the order of operations
  if (error) {
    std::rethrow_exception(error);
  }
}

void Communicator::registerMemory(
    Registrations::Pool pool, const std::vector<Segment>& segments, bool symmetric) {
  const char* const what = name(OpKind::registerMemory);
  if (symmetric) {
    need(api_.commWindowRegister, what, "ncclCommWindowRegister", "2.27.3");
  } else {
    need(api_.commRegister, what, "ncclCommRegister", "2.19.3");
  }
  refuseSuspended();
  manage(OpKind::registerMemory, [&](ncclComm_t comm) {
    for (const auto& segment : segments) {
      const auto result = registrations_.add(comm, pool, segment, symmetric);
      if (result != ncclSuccess) {
        return result;
      }
    }
    return ncclSuccess;
  });
}

bool Communicator::deregisterMemory(Registrations::Pool pool) {
  std::lock_guard lock(issueMutex_);
  const auto result = registrations_.remove(pool);
  TORCH_CHECK(
      result.value_or(ncclSuccess) == ncclSuccess,
      "deregister_mem_pool: group '",
      group_.name,
      "': ",
      api_.getErrorString(*result));
  return result.has_value();
}

void Communicator::suspend() {
  need(api_.commSuspend, "suspend", "ncclCommSuspend", "2.29.7");
  TORCH_CHECK(
      !suspended_.exchange(true),
      "suspend: group '",
      group_.name,
      "' is suspended already; call resume() first");
  try {
    drain();
    manage(
        OpKind::suspend, [&](ncclComm_t comm) { return api_.commSuspend(comm, NCCL_SUSPEND_MEM); });
  } catch (...) {
    suspended_ = false;
    throw;
  }
}

void Communicator::resume() {
  need(api_.commResume, "resume", "ncclCommResume", "2.29.7");
  TORCH_CHECK(
      suspended_, "resume: group '", group_.name, "' is not suspended; suspend() comes before");
  manage(OpKind::resume, [&](ncclComm_t comm) { return api_.commResume(comm); });
  suspended_ = false;
}

std::unordered_map<std::string, uint64_t> Communicator::memoryStats() {
  need(api_.commMemStats, "memory_stats", "ncclCommMemStats", "2.29.7");
  static constexpr std::pair<const char*, ncclCommMemStat_t> kStats[] = {
      {"suspend", ncclStatGpuMemSuspend},
      {"suspended", ncclStatGpuMemSuspended},
      {"persist", ncclStatGpuMemPersist},
      {"total", ncclStatGpuMemTotal}};
  awaitInitialization();
  std::lock_guard lock(issueMutex_);
  auto* const comm = usable();
  std::unordered_map<std::string, uint64_t> stats;
  for (const auto& [key, stat] : kStats) {
    const auto result = api_.commMemStats(comm, stat, &stats[key]);
    TORCH_CHECK(
        result == ncclSuccess,
        "memory_stats: group '",
        group_.name,
        "': ",
        api_.getErrorString(result),
        " (",
        api_.getLastError(comm),
        ")");
  }
  return stats;
}

}  // namespace torchcomms_pg
