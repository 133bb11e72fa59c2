// Turns exceptions into result codes and last-error texts.
#pragma once

#include <nccl.h>

#include <exception>
#include <memory>
#include <new>
#include <type_traits>

#include "shm/Comm.hpp"
#include "shm/api/GroupCalls.hpp"
#include "shm/api/Handles.hpp"

namespace torchcomms_pg::shm {

// Runs `body` and returns its result, or ncclSuccess if it returns none. An exception becomes a
// result code and this thread's last error.
template <class Body>
ncclResult_t guarded(const Body& body) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      return ncclSuccess;
    } else {
      return body();
    }
  } catch (const NcclError& failure) {
    return reportFailure(failure.result, failure.what());
  } catch (const std::bad_alloc&) {
    return reportFailure(ncclSystemError, "out of memory");
  } catch (const std::exception& error) {
    return reportFailure(ncclInternalError, error.what());
  }
}

// Does the same with body(comm). Refuses a handle that a fork has taken over from its parent.
template <class Body>
ncclResult_t withComm(ncclComm_t handle, const char* operation, const Body& body) noexcept {
  return guarded([&] {
    const std::shared_ptr<Comm> comm = findHandle(handle, operation);
    comm->checkProcess();
    return body(comm);
  });
}

}  // namespace torchcomms_pg::shm
