// Which ranks of a job have reported.
#pragma once

#include <cstdint>
#include <list>
#include <set>
#include <utility>

#include "diagnosis/status/ProcessStatus.hpp"

namespace torchcomms_pg::status {

// Records which ranks of a job have reported, while hosts answer one after another.
class Roll {
 public:
  explicit Roll(const JobQuestion& asked) : asked_(asked) {}

  // Records the ranks of a host. The first call must be for the asked process's host.
  void add(const HostStatus& host);
  // Returns whether every rank of the job's groups has reported, or its process is known not to
  // answer.
  bool complete() const { return job_.size() > 0 && wanted_.empty(); }

 private:
  using Rank = std::pair<uint64_t, int64_t>;  // a group's id, and a global rank

  bool take(const ProcessStatus& process, bool asked);
  void hear(const Rank& rank) {
    heard_.insert(rank);
    wanted_.erase(rank);
  }

  const JobQuestion asked_;
  std::set<uint64_t> job_;                // ids of the job's groups
  std::list<ProcessStatus> unconnected_;  // processes in none of these groups
  std::set<Rank> heard_;
  std::set<Rank> wanted_;
};

}  // namespace torchcomms_pg::status
