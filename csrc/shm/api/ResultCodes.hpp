// Turns exceptions into result codes and last-error texts.
#pragma once

#include <nccl.h>

#include <exception>
#include <memory>
#include <new>

#include "shm/Comm.hpp"
#include "shm/api/Handles.hpp"

namespace torchcomms_pg::shm {

// Keeps `text` as this thread's last error, and as the error of an open group that has no error
// yet. Returns `result`.
ncclResult_t reportFailure(ncclResult_t result, const char* text) noexcept;

// Runs `body` and returns its result. An exception becomes a result code and this thread's last
// error.
template <class Body>
ncclResult_t guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const NcclError& failure) {
    return reportFailure(failure.result, failure.what());
  } catch (const std::bad_alloc&) {
    return reportFailure(ncclSystemError, "out of memory");
  } catch (const std::exception& error) {
    return reportFailure(ncclInternalError, error.what());
  }
}

template <class Body>
ncclResult_t withComm(ncclComm_t handle, const char* operation, const Body& body) noexcept {
  return guarded([&] { return body(findHandle(handle, operation)); });
}

}  // namespace torchcomms_pg::shm
