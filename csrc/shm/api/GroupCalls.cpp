#include "shm/api/GroupCalls.hpp"

#include <span>
#include <utility>
#include <vector>

#include "shm/collective/Plan.hpp"

namespace torchcomms_pg::shm {
namespace {

struct GroupState {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::string errorText;
  std::vector<IssuedOp> operations;
};

thread_local GroupState group;
thread_local std::string lastError;

// Launches operations. Throws NcclError, and launches none, unless all have one communicator and
// one stream.
void launch(std::span<IssuedOp> operations) {
  const std::shared_ptr<Comm> comm = operations.front().comm;
  const cudaStream_t stream = operations.front().stream;
  const auto plan = std::make_shared<Plan>(comm, stream);
  for (IssuedOp& operation : operations) {
    if (operation.comm != comm || operation.stream != stream) {
      throw NcclError(
          ncclInvalidUsage,
          "groupEnd: a group over shared memory has one communicator and one stream");
    }
    std::visit([&](auto& what) { plan->add(std::move(what)); }, operation.what);
  }
  if (plan->start() != ncclSuccess) throw comm->segment().failure();
}

}  // namespace

void issue(IssuedOp operation) {
  if (const auto* transfer = std::get_if<std::shared_ptr<Transfer>>(&operation.what)) {
    if ((*transfer)->done != nullptr) {
      return operation.comm->pointToPoint().runIndependently(*transfer);
    }
  }
  if (group.depth != 0) {
    group.operations.push_back(std::move(operation));
    return;
  }
  if (operation.stream == nullptr) {
    // Runs a put or a wait for signals without a plan, which would allocate memory.
    Comm& comm = *operation.comm;
    if (const auto* put = std::get_if<Put>(&operation.what)) return comm.windows().run(*put);
    if (auto* wait = std::get_if<SignalWait>(&operation.what)) {
      comm.windows().expect(*wait);
      return comm.windows().run(*wait);
    }
  }
  launch({&operation, 1});
}

void groupStart() {
  ++group.depth;
}

void groupEnd() {
  if (group.depth == 0) {
    throw NcclError(ncclInvalidUsage, "groupEnd: there was no groupStart in this thread");
  }
  if (--group.depth != 0) return;
  GroupState ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) throw NcclError(ended.error, ended.errorText);
  if (!ended.operations.empty()) launch(ended.operations);
}

bool groupOpen() {
  return group.depth != 0;
}

void checkNoGroup(const char* operation) {
  if (group.depth != 0) {
    throw NcclError(
        ncclInvalidUsage,
        std::string(operation) +
            ": called inside a group, which over shared memory has operations alone");
  }
}

void deferError(ncclResult_t result, const std::string& text) {
  if (group.depth == 0 || group.error != ncclSuccess) return;
  group.error = result;
  group.errorText = text;
}

const std::string& threadError() {
  return lastError;
}

void setThreadError(const std::string& text) {
  lastError = text;
}

}  // namespace torchcomms_pg::shm
