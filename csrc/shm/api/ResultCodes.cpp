#include "shm/api/ResultCodes.hpp"

#include "shm/api/Group.hpp"

namespace torchcomms_pg::shm {

ncclResult_t reportFailure(ncclComm_t handle, ncclResult_t result, const char* text) noexcept {
  try {
    setThreadError(text);
    deferError(result, text);
    if (handle != nullptr) findHandle(handle, "")->setLastError(text);
  } catch (const std::exception&) {
    // The handle itself was wrong, or there is no memory for the text.
  }
  return result;
}

}  // namespace torchcomms_pg::shm
