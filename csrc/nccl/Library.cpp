#include "nccl/Library.hpp"

namespace torchcomms_pg {

Introduced introduced(Feature feature) {
  switch (feature) {
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
    case Feature::severalIds:
    case Feature::barrier:
    case Feature::tags:
    case Feature::deferral:
    case Feature::fail:
    case Feature::missingRanks:
    case Feature::ring:
    case Feature::probe: break;  // no call raises an error for them
  }
  return {"", ""};
}

std::string versionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

ncclResult_t Library::runGrouped(
    std::span<const Collective> collectives, ncclComm_t comm, cudaStream_t stream) const {
  return grouped(collectives, [&](const Collective& c) { return run(c, comm, stream); });
}

}  // namespace torchcomms_pg
