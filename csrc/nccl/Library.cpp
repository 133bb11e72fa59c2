#include "nccl/Library.hpp"

namespace torchcomms_pg {

Introduced introduced(Feature feature) {
  switch (feature) {
    case Feature::severalIds: return {"ncclCommInitRankScalable", "2.23.4"};
    case Feature::allocator: return {"ncclMemAlloc", "2.19.3"};
    case Feature::registration: return {"ncclCommRegister", "2.19.3"};
    case Feature::windowRegistration: return {"ncclCommWindowRegister", "2.27.3"};
    case Feature::windows:
      return {"ncclSignal, ncclWaitSignal or ncclGetPeerDevicePointer", "2.29.2"};
    case Feature::shrink: return {"ncclCommShrink", "2.27.3"};
    case Feature::revoke: return {"ncclCommRevoke", "2.28.7"};
    case Feature::suspend: return {"ncclCommSuspend", "2.29.7"};
    case Feature::resume: return {"ncclCommResume", "2.29.7"};
    case Feature::memoryStats: return {"ncclCommMemStats", "2.29.7"};
    default: return {"", ""};  // beyond NCCL
  }
}

std::string versionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

ncclResult_t Library::init(ncclComm_t*, std::span<ncclUniqueId>, int, int, ncclConfig_t*) const {
  return ncclInvalidUsage;
}

ncclResult_t Library::shrink(
    ncclComm_t,
    std::span<int>,
    ncclComm_t*,
    ncclConfig_t*,
    int,
    std::chrono::steady_clock::time_point) const {
  return ncclInvalidUsage;
}

ncclResult_t Library::fail(
    ncclComm_t, ncclResult_t, const std::string&, const std::vector<int>&) const {
  return ncclInvalidUsage;
}

ncclResult_t Library::put(
    const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, ncclComm_t, cudaStream_t)
    const {
  return ncclInvalidUsage;
}

ncclResult_t Library::windowView(ncclComm_t, ncclWindow_t, int, WindowView&) const {
  return ncclInvalidUsage;
}

ncclResult_t Library::runGrouped(
    std::span<const Collective> collectives, ncclComm_t comm, cudaStream_t stream) const {
  return grouped([&] {
    for (const auto& collective : collectives) {
      const auto result = run(collective, comm, stream);
      if (result != ncclSuccess) {
        return result;
      }
    }
    return ncclSuccess;
  });
}

}  // namespace torchcomms_pg
