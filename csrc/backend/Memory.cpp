// Memory of the group's accelerators: tensors' memory registered with NCCL, and NCCL's own memory.
#include <ATen/DeviceAccelerator.h>

#include "backend/Backend.hpp"
#include "backend/RegisteredMemory.hpp"

namespace torchcomms_pg {

std::vector<Backend::CommPtr> Backend::accelerators(const char* what) const {
  std::vector<CommPtr> found;
  {
    LockGuard lock(communicatorsMutex_);
    found = accelerators_;
  }
  TORCH_CHECK(
      !found.empty(), what, ": group '", options_->group_name,
      "' has no connections for an accelerator, and so no memory there; run one of its operations "
      "first, or pass device_id to init_process_group");
  return found;
}

void Backend::registerPool(
    Registrations::Pool pool, const std::map<int, std::vector<PoolSegment>>& segments,
    bool symmetric) {
  const auto type = at::getAccelerator(/*checked=*/true).value();
  for (const auto& [index, ofDevice] : segments) {
    const at::Device device(type, static_cast<at::DeviceIndex>(index));
    ops::registerMemory(*communicator("register_mem_pool", device), pool, ofDevice, symmetric);
  }
}

void Backend::deregisterPool(Registrations::Pool pool) {
  bool known = false;
  for (const auto& comm : communicators()) {
    known |= ops::deregisterMemory(*comm, pool);
  }
  TORCH_CHECK_VALUE(
      known, "deregister_mem_pool: pool (", pool.first, ", ", pool.second,
      ") is not registered with group '", options_->group_name,
      "'; pass one that register_mem_pool has got");
}

void Backend::suspend() {
  for (const auto& comm : accelerators("suspend")) {
    ops::suspend(*comm);
  }
}

void Backend::resume() {
  for (const auto& comm : accelerators("resume")) {
    ops::resume(*comm);
  }
}

std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  std::unordered_map<std::string, uint64_t> sums;
  for (const auto& comm : accelerators("memory_stats")) {
    for (const auto& [name, value] : ops::memoryStats(*comm)) {
      sums[name] += value;
    }
  }
  return sums;
}

}  // namespace torchcomms_pg
