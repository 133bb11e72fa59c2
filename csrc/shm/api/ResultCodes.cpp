#include "shm/api/ResultCodes.hpp"

#include "shm/api/GroupCalls.hpp"

namespace torchcomms_pg::shm {

ncclResult_t reportFailure(ncclResult_t result, const char* text) noexcept {
  try {
    setThreadError(text);
    deferError(result, text);
  } catch (const std::exception&) {
    // There is no memory for the text.
  }
  return result;
}

}  // namespace torchcomms_pg::shm
