// The status of a job, as JSON, and when all have told theirs.
#pragma once

#include <cstdint>
#include <list>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "status/Job.hpp"

namespace torchcomms_pg::status {

// Which ranks of a job have been heard of, while hosts answer one after another.
class Roll {
 public:
  explicit Roll(const JobQuestion& asked) : asked_(asked) {}

  // Takes down who is on a host. Of the asked process's host first.
  void add(const HostStatus& host);
  // Returns whether all ranks of the job's groups have told, or are known not to.
  bool complete() const { return job_.size() > 0 && wanted_.empty(); }

 private:
  using Rank = std::pair<uint64_t, int64_t>;  // a group's id, and the job's number

  bool take(const ProcessStatus& process, bool asked);
  void hear(const Rank& rank) {
    heard_.insert(rank);
    wanted_.erase(rank);
  }

  const JobQuestion asked_;
  std::set<uint64_t> job_;                // ids of its groups
  std::list<ProcessStatus> unconnected_;  // those that share no group with these
  std::set<Rank> heard_;
  std::set<Rank> wanted_;
};

// Writes the job's status as JSON, in the form of docs/status.md.
std::string report(
    const std::vector<HostStatus>& hosts,
    const std::vector<UnreachedHost>& unreached,
    const JobQuestion& question);

}  // namespace torchcomms_pg::status
