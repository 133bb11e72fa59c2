#include "shm/api/Group.hpp"

#include <algorithm>
#include <system_error>
#include <thread>
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
  std::vector<Job> jobs;
};

thread_local GroupState group;
thread_local std::string lastError;

void addTo(Plan& plan, IssuedOp& operation) {
  plan.addStream(operation.stream);
  std::visit([&](auto& what) { plan.add(std::move(what)); }, operation.what);
}

ncclResult_t launchAll(std::vector<IssuedOp> operations) {
  std::vector<Plan> plans;
  for (IssuedOp& operation : operations) {
    auto plan = std::ranges::find_if(
        plans, [&](const Plan& plan) { return &plan.comm() == operation.comm.get(); });
    if (plan == plans.end()) plan = plans.insert(plans.end(), Plan(operation.comm));
    addTo(*plan, operation);
  }
  std::vector<std::shared_ptr<Launch>> launches;
  for (Plan& plan : plans) {
    auto launch = std::make_shared<Launch>();
    std::erase_if(launches, [&](const std::shared_ptr<Launch>& other) {
      if (!other->sharesStream(plan)) return false;
      launch->absorb(*other);
      return true;
    });
    launch->add(std::move(plan));
    launches.push_back(std::move(launch));
  }
  // Launches that block the caller come last, so that they delay no other.
  std::ranges::stable_partition(launches, [](const auto& launch) { return !launch->usesCaller(); });
  ncclResult_t result = ncclSuccess;
  for (const auto& launch : launches) {
    const ncclResult_t one = launch->start();
    if (result == ncclSuccess) result = one;
  }
  for (const IssuedOp& operation : operations) {
    if (result != ncclSuccess && operation.comm->segment().failed()) {
      throw operation.comm->segment().failure();
    }
  }
  return result;
}

ncclResult_t runJobs(const std::vector<Job>& jobs) {
  struct Outcome {
    ncclResult_t result = ncclSuccess;
    std::string text;
  };
  std::vector<Outcome> outcomes(jobs.size());
  const auto run = [&](size_t i) {
    try {
      outcomes[i].result = jobs[i].run();
    } catch (const NcclError& failure) {
      outcomes[i] = {failure.result, failure.what()};
    } catch (const std::exception& error) {
      outcomes[i] = {ncclSystemError, error.what()};
    }
  };
  for (const Job& job : jobs) {
    if (job.prepare) job.prepare();
  }
  {
    std::vector<std::jthread> helpers;
    size_t begun = 1;
    try {
      for (; begun < jobs.size(); ++begun) helpers.emplace_back(run, begun);
    } catch (const std::system_error& error) {
      // Ranks of these jobs may need each other, so the jobs cannot run one after another.
      for (; begun < jobs.size(); ++begun) {
        jobs[begun].cancel();
        outcomes[begun] = {
            ncclSystemError, std::string("groupEnd: cannot start a thread: ") + error.what()};
      }
    }
    if (!jobs.empty()) run(0);
  }
  ncclResult_t result = ncclSuccess;
  for (const Outcome& outcome : outcomes) {
    if (outcome.result == ncclSuccess) continue;
    if (outcome.result != ncclInProgress) throw NcclError(outcome.result, outcome.text);
    result = ncclInProgress;
  }
  return result;
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
    // Takes the short way, without allocations.
    Comm& comm = *operation.comm;
    if (const auto* collective = std::get_if<Collective>(&operation.what)) {
      return comm.run(*collective);
    }
    if (const auto* put = std::get_if<Put>(&operation.what)) return comm.windows().run(*put);
    if (const auto* wait = std::get_if<SignalWait>(&operation.what)) {
      return comm.windows().run(*wait);
    }
  }
  const std::shared_ptr<Comm> comm = operation.comm;
  auto launch = std::make_shared<Launch>();
  Plan plan(comm);
  addTo(plan, operation);
  launch->add(std::move(plan));
  if (launch->start() != ncclSuccess) throw comm->segment().failure();
}

ncclResult_t issue(Job job) {
  if (group.depth == 0) {
    if (job.prepare) job.prepare();
    return job.run();
  }
  group.jobs.push_back(std::move(job));
  return ncclSuccess;
}

void groupStart() {
  ++group.depth;
}

ncclResult_t groupEnd() {
  if (group.depth == 0) {
    throw NcclError(ncclInvalidUsage, "groupEnd: there was no groupStart in this thread");
  }
  if (--group.depth != 0) return ncclSuccess;
  GroupState ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) {
    for (const Job& job : ended.jobs) job.cancel();
    throw NcclError(ended.error, ended.errorText);
  }
  const ncclResult_t result = runJobs(ended.jobs);
  if (ended.operations.empty()) return result;
  const ncclResult_t launched = launchAll(std::move(ended.operations));
  return launched == ncclSuccess ? result : launched;
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
