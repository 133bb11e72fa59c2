#include "libnccl/Communicator.hpp"

#include <chrono>
#include <cstdlib>
#include <set>
#include <utility>

#include "libnccl/Groups.hpp"
#include "libnccl/Misuse.hpp"
#include "libnccl/Version.hpp"
#include "shm/api/Api.hpp"

namespace emulated {

namespace {

struct Handles {
  std::mutex mutex;
  std::set<ncclComm_t> alive;
  std::set<ncclComm_t> ended;
};

Handles& handles() {
  static auto* const instance = new Handles;
  return *instance;
}

}  // namespace

const torchcomms_pg::NcclApi& shm() {
  return torchcomms_pg::shm::ncclFunctions();
}

ncclComm_t publish(std::unique_ptr<Comm> comm) {
  const std::lock_guard lock(handles().mutex);
  return *handles().alive.insert(comm.release()).first;
}

void end(Comm& comm) {
  const std::lock_guard lock(handles().mutex);
  handles().alive.erase(&comm);
  handles().ended.insert(&comm);
}

ncclResult_t check(ncclComm_t comm, const char* function) {
  if (comm == nullptr) {
    setError(std::string(function) + " : comm argument is NULL");
    return ncclInvalidArgument;
  }
  const std::lock_guard lock(handles().mutex);
  if (handles().alive.contains(comm)) return ncclSuccess;
  setError(std::string(function) + " : corrupted comm object detected");
  misuse(
      function, handles().ended.contains(comm) ? "the communicator was destroyed or aborted before"
                                               : "this is no communicator");
  return ncclInvalidArgument;
}

Inside::Inside(Comm& comm, const char* function) : comm_(comm) {
  const std::lock_guard lock(comm.mutex);
  for (const auto& [thread, other] : comm.inside) {
    if (thread == std::this_thread::get_id()) continue;
    misuse(function, "another thread is in " + other + " of the same communicator");
  }
  comm.inside.emplace(std::this_thread::get_id(), function);
}

Inside::~Inside() {
  const std::lock_guard lock(comm_.mutex);
  comm_.inside.erase(comm_.inside.find(std::this_thread::get_id()));
}

// src/group.cc, ncclGroupJobComplete: joins the thread and frees the job, without a lock, so that a
// second thread that does the same uses freed memory.
void completeJob(Comm& comm) {
  std::shared_ptr<GroupJob> job;
  {
    const std::lock_guard lock(comm.mutex);
    if (comm.jobDangles) {
      comm.jobDangles = false;
      misuse("ncclCommGetAsyncError", "ncclCommRevoke has freed the group job that this completes");
    }
    if (!comm.job) return;
    if (comm.completing > 0) {
      misuse("ncclGroupJobComplete", "two threads complete one group job: use after free in NCCL");
    }
    ++comm.completing;
    job = comm.job;
  }
  job->join();
  const std::lock_guard lock(comm.mutex);
  --comm.completing;
  if (comm.job == job) comm.job.reset();
}

ncclResult_t asyncError(Comm& comm) {
  const auto state = comm.state.load();
  if (state != ncclSuccess) return state;
  if (asyncErrorCompletesJobs()) completeJob(comm);
  auto result = ncclSuccess;
  const auto asked = shm().commGetAsyncError(comm.shm, &result);
  if (isNotTold(result)) return ncclSuccess;
  const auto found = asked == ncclSuccess ? result : asked;
  // The thread that notices it warns, once.
  return comm.warned.exchange(found != ncclSuccess) ? found : told(found, comm.shm);
}

ncclResult_t told(ncclResult_t result, ncclComm_t joined) {
  if (result != ncclSuccess && result != ncclInProgress) setError(shm().getLastError(joined));
  return result;
}

bool overNetwork() {
  static const bool hosts = std::getenv("NCCL_HOSTID") != nullptr;
  return hosts;
}

bool isNotTold(ncclResult_t error) {
  // What ranks call wrongly is found out here, where NCCL would wait or go on.
  static const bool mismatchesHang = std::getenv("EMULATED_MISMATCHES_HANG") != nullptr;
  if (error == ncclInvalidUsage) return mismatchesHang;
  return error == ncclRemoteError && !overNetwork();
}

bool hasFailedUntold(Comm& comm) {
  auto* const joined = comm.shm.load();
  auto error = ncclSuccess;
  return joined != nullptr && shm().commGetAsyncError(joined, &error) == ncclSuccess &&
         isNotTold(error);
}

void spin(Comm& comm, bool failed, bool late) {
  const bool waits = failed && hasFailedUntold(comm);
  const auto ends = [&] {
    if (late) return comm.size == 1;
    return !waits || comm.revoked;
  };
  if (comm.aborted || ends()) return;
  ++counts().spinning;
  while (!comm.aborted && !ends()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --counts().spinning;
}

Counts& counts() {
  static Counts instance;
  return instance;
}

ncclResult_t ensureReady(Comm& comm, const char* function) {
  const auto state = comm.state.load();
  if (state == ncclSuccess) {
    completeJob(comm);
    const auto now = asyncError(comm);
    return now == ncclInProgress ? ncclSuccess : now;
  }
  setError(
      std::string(function) +
      " : Attempt to use communicator before the previous operation returned ncclSuccess");
  return state == ncclInProgress ? ncclInvalidArgument : state;
}

ncclResult_t refused(Comm& comm, ncclResult_t result, const std::string& why) {
  if (!why.empty()) setError(why);
  if (!comm.blocking) comm.state.store(result);
  return result;
}

}  // namespace emulated
