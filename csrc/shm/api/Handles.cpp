#include "shm/api/Handles.hpp"

#include <cstdint>
#include <unordered_map>

#include "base/Mutex.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

// Communicators by handle. A handle is a number, since a later communicator could get the address
// of a freed communicator.
struct Table {
  Mutex mutex;
  uintptr_t next GUARDED_BY(mutex) = 1;
  std::unordered_map<ncclComm_t, std::shared_ptr<Comm>> comms GUARDED_BY(mutex);
};

Table& table() {
  return forkSafe<Table>();
}

}  // namespace

ncclComm_t addHandle(std::shared_ptr<Comm> comm) {
  LockGuard lock(table().mutex);
  const auto handle = reinterpret_cast<ncclComm_t>(table().next++);
  table().comms[handle] = std::move(comm);
  return handle;
}

std::shared_ptr<Comm> findHandle(ncclComm_t handle, const char* operation) {
  if (handle == nullptr) {
    throw NcclError(ncclInvalidArgument, std::string(operation) + ": comm is null");
  }
  LockGuard lock(table().mutex);
  const auto found = table().comms.find(handle);
  if (found == table().comms.end()) {
    throw NcclError(
        ncclInvalidArgument,
        std::string(operation) +
            ": comm is not a communicator of this library, or was destroyed or aborted");
  }
  return found->second;
}

bool isHandle(ncclComm_t handle) {
  LockGuard lock(table().mutex);
  return table().comms.contains(handle);
}

void removeHandle(ncclComm_t handle) {
  decltype(Table::comms)::node_type
      removed;  // declared first, so that it is destroyed after unlocking
  LockGuard lock(table().mutex);
  removed = table().comms.extract(handle);
}

}  // namespace torchcomms_pg::shm
