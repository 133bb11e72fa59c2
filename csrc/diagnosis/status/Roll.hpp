// Which processes belong to a job, and which of its ranks have reported.
#pragma once

#include <cstdint>
#include <list>
#include <set>
#include <utility>

#include "diagnosis/status/ProcessStatus.hpp"

namespace torchcomms_pg::status {

// Finds the processes of a job, while hosts answer one after another: the asked process, and each
// process that is in a group, or in a meeting, with another process of the job.
class Roll {
 public:
  explicit Roll(const JobQuestion& asked) : asked_(asked) {}

  // Records the processes and ranks of a host.
  void add(const HostStatus& host);
  bool isAsked(const HostStatus& host, const ProcessStatus& process) const {
    return process.pid == asked_.pid && host.host == asked_.host;
  }
  // Return whether the group, and the process, belong to the job. False may be wrong until all
  // hosts have been added.
  bool includes(uint64_t group) const { return job_.contains(group); }
  bool includes(const ProcessStatus& process) const;
  // Returns whether every rank of the job's groups has reported, or its process is known not to
  // answer. False before the asked process's host has been added.
  bool complete() const { return knowsGroup_ && wanted_.empty(); }

 private:
  using Rank = std::pair<uint64_t, int64_t>;  // a group's id, and a global rank

  void take(const ProcessStatus& process);
  void hear(const Rank& rank) {
    heard_.insert(rank);
    wanted_.erase(rank);
  }

  const JobQuestion asked_;
  std::set<uint64_t> job_;  // ids of the job's groups, and numbers of its meetings
  bool knowsGroup_ = false;
  std::list<ProcessStatus> unconnected_;  // processes in none of these
  std::set<Rank> heard_;
  std::set<Rank> wanted_;
};

}  // namespace torchcomms_pg::status
