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
ncclResult_t reportFailure(ncclComm_t handle, ncclResult_t result, const char* text) noexcept;

// Runs `body`. `handle`: the communicator whose last error its failure becomes; may be null.
template <class Body>
ncclResult_t guarded(ncclComm_t handle, const Body& body) noexcept {
  try {
    return body();
  } catch (const NcclError& failure) {
    return reportFailure(handle, failure.result, failure.what());
  } catch (const std::bad_alloc&) {
    return reportFailure(handle, ncclSystemError, "out of memory");
  } catch (const std::exception& error) {
    return reportFailure(handle, ncclInternalError, error.what());
  }
}

template <class Body>
ncclResult_t withComm(ncclComm_t handle, const char* operation, const Body& body) noexcept {
  return guarded(handle, [&] {
    const std::shared_ptr<Comm> comm = findHandle(handle, operation);
    return body(comm);
  });
}

}  // namespace torchcomms_pg::shm
