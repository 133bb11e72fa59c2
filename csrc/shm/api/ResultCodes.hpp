// Turns exceptions into result codes and last-error texts.
#pragma once

#include <nccl.h>

#include <exception>
#include <memory>
#include <new>

#include "shm/Comm.hpp"
#include "shm/api/Handles.hpp"

namespace torchcomms_pg::shm {

// Keeps the text, also as the error of the open group, and returns `result`.
ncclResult_t reportFailure(ncclResult_t result, const char* text) noexcept;

// Runs `body`. Its error becomes the last one of this thread.
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
