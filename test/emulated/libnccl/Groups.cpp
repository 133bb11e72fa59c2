#include "libnccl/Groups.hpp"

#include <pthread.h>

#include <algorithm>
#include <list>
#include <utility>
#include <vector>

#include "libnccl/LaunchOrder.hpp"
#include "libnccl/Misuse.hpp"

namespace emulated {

namespace {

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Task> tasks;
};

thread_local Group group;

// Sets up each rank in a thread of its own, since setting up takes all ranks. Returns the first
// failure.
ncclResult_t setUp(const std::vector<Task>& tasks) {
  std::vector<ncclResult_t> results(tasks.size(), ncclSuccess);
  {
    std::vector<std::jthread> helpers;
    for (size_t i = 1; i < tasks.size(); ++i) {
      helpers.emplace_back([&, i] { results[i] = tasks[i].run(); });
    }
    if (!tasks.empty()) results[0] = tasks[0].run();
  }
  for (const auto result : results) {
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

// Returns the communicators of the tasks, each once.
std::vector<Comm*> commsOf(const std::vector<Task>& tasks) {
  std::vector<Comm*> comms;
  for (const auto& task : tasks) {
    if (std::ranges::find(comms, task.comm) == comms.end()) comms.push_back(task.comm);
  }
  return comms;
}

// Launches what each communicator has, since a group of csrc/shm has one, in the order in which the
// program names them: NCCL keeps that, too (src/include/group.h, ncclGroupCommJoin), so that in one
// stream it has to be the same on all ranks. Launches do not block: no stream is null.
ncclResult_t operate(const std::vector<Task>& tasks) {
  if (tasks.empty()) return ncclSuccess;
  gates().launch.pass();
  for (auto* const comm : commsOf(tasks)) {
    int device = 0;
    std::vector<torchcomms_pg::host::HostStream*> streams;
    for (const auto& task : tasks) {
      if (task.comm != comm || task.stream == nullptr) continue;
      device = task.device;
      if (std::ranges::find(streams, task.stream) == streams.end()) streams.push_back(task.stream);
    }
    auto result = ncclSuccess;
    inLaunchOrder(device, streams, [&] {
      shm().groupStart();
      for (const auto& task : tasks) {
        if (task.comm == comm) task.run();  // the end returns an error
      }
      result = shm().groupEnd();
    });
    if (result == ncclInvalidUsage && hasFailedUntold(*comm)) {
      for (auto* const stream : streams) {
        stream->enqueue([comm] { spin(*comm, /*failed=*/true, /*late=*/false); });
      }
      continue;
    }
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

ncclResult_t launch(const std::vector<Task>& tasks) {
  std::vector<Task> setups;
  std::vector<Task> operations;
  for (const auto& task : tasks) (task.setup ? setups : operations).push_back(task);
  const auto result = setUp(setups);
  return told(result == ncclSuccess ? operate(operations) : result);
}

void startJob(std::vector<Task> tasks) {
  const auto comms = commsOf(tasks);
  for (auto* const comm : comms) comm->state.store(ncclInProgress);
  auto job = std::make_shared<GroupJob>([tasks = std::move(tasks), comms] {
    pthread_setname_np(pthread_self(), "nccl_group");
    const auto result = launch(tasks);
    // src/group.cc, groupLaunch: also over what calls that were refused meanwhile have left.
    for (auto* const comm : comms) {
      if (!comm->aborted) comm->state.store(result);
    }
    gates().end.pass();
  });
  for (auto* const comm : comms) {
    const std::lock_guard lock(comm->mutex);
    comm->job = job;
  }
}

}  // namespace

GroupJob::~GroupJob() {
  join();
}

void GroupJob::join() {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // it drops its own last reference
  } else {
    thread_.join();
  }
}

Gates& gates() {
  static Gates instance;
  return instance;
}

void groupStart() {
  ++group.depth;
}

void failGroup(ncclResult_t error) {
  if (group.depth > 0 && group.error == ncclSuccess) group.error = error;
}

ncclResult_t groupEnd() {
  if (group.depth == 0) {
    setError("ncclGroupEnd: not in a group call.");
    return ncclInvalidUsage;
  }
  if (--group.depth > 0) return ncclSuccess;
  const auto ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) return ended.error;
  if (ended.tasks.empty()) return ncclSuccess;
  const bool blocking = ended.tasks.front().comm->blocking;
  for (const auto& task : ended.tasks) {
    if (task.comm->blocking != blocking) {
      // src/group.cc, ncclAsyncLaunch and src/include/group.h, ncclGroupCommJoin
      setError("Blocking and nonblocking communicators are not allowed in the same group.");
      return ncclInvalidArgument;
    }
  }
  if (blocking) {
    std::list<Inside> inside;
    for (auto* const comm : commsOf(ended.tasks)) inside.emplace_back(*comm, "ncclGroupEnd");
    const auto result = launch(ended.tasks);
    for (const auto& task : ended.tasks) {
      if (task.setup && !task.comm->aborted) task.comm->state.store(result);
    }
    return result;
  }
  startJob(ended.tasks);
  return ncclInProgress;
}

ncclResult_t submit(Task task) {
  auto& comm = *task.comm;
  groupStart();
  group.tasks.push_back(std::move(task));
  const bool alone = group.depth == 1;
  const auto result = groupEnd();
  // src/enqueue.cc, ncclEnqueueCheck: "the state can change so we have to check state here".
  return alone && !comm.blocking && result == ncclInProgress ? asyncError(comm) : result;
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) void emulatedNcclHold(
    int launch, int finalize, int end) {
  auto& all = emulated::gates();
  all.launch.close(launch != 0);
  all.finalize.close(finalize != 0);
  all.end.close(end != 0);
}

// Returns how many threads are held up.
extern "C" __attribute__((visibility("default"))) int emulatedNcclHeld() {
  auto& all = emulated::gates();
  return all.launch.held() + all.finalize.held() + all.end.held();
}

// Returns a number of Counts: of kernels that have begun, of those that spin, of revocations.
extern "C" __attribute__((visibility("default"))) int emulatedNcclCount(int which) {
  auto& all = emulated::counts();
  return which == 0 ? all.begun : which == 1 ? all.spinning : all.revoked;
}
