// Combines what the processes of a job have reported: which rank is in which group, and which rank
// waits for which, by the rule of blame (monitor/Blame.hpp).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "monitor/Verdict.hpp"
#include "status/ProcessStatus.hpp"

namespace torchcomms_pg::status {

// A host whose processes have not reported.
struct UnreachedHost {
  std::string host;
  std::string why;
};

struct JobQuestion {
  uint32_t pid = 0;    // of the asked process, whose groups define the job
  std::string host;    // its host
  int64_t lateMs = 0;  // an operation of at least this age counts as late
  int64_t tookMs = 0;  // time from the first question to the last answer
};

// Returns the host's name, without what ownPlace() adds to it.
std::string nameOfHost(const std::string& place);

// Keeps references to its arguments. Ignores operations that were issued while the answers were
// collected, since the ranks' reports are of different times.
class Job {
 public:
  // What is known of one rank of a group.
  struct Member {
    const ProcessStatus* process = nullptr;
    const RankActivity* activity = nullptr;
    const MemberStatus* told = nullptr;
  };

  // The diagnosis of a group's oldest operation.
  struct Finding {
    int rank = 0;  // the rank that has waited longest
    const OpInFlight* op = nullptr;
    Verdict verdict;
  };

  struct Group {
    uint64_t id = 0;
    const MemberStatus* any = nullptr;  // some member's status, for what all have in common
    std::map<int, Member> members;      // members that have answered, by rank in the group
    std::optional<Finding> waits;       // nullopt if no rank has waited long
  };

  // A process that does not answer, and its host.
  struct Quiet {
    const HostStatus* host = nullptr;
    const SilentProcess* process = nullptr;
  };

  Job(const std::vector<HostStatus>& hosts,
      const std::vector<UnreachedHost>& unreached,
      const JobQuestion& question);

  const JobQuestion& question() const { return question_; }
  const std::string& store() const { return store_; }
  const std::string& run() const { return run_; }
  const std::string& version() const { return version_; }  // of torchcomms_pg
  bool healthy() const { return healthy_; }
  // Returns the groups without the unused ones, largest first.
  std::vector<const Group*> groups() const;
  // Returns whether the group is the part for a device on which no rank has issued anything. For
  // example, a group in the place of Gloo has a part for CUDA also on a host without CUDA.
  bool isUnused(uint64_t id) const { return unused_.contains(id); }
  // Returns the ranks that answer, with `told` null.
  const std::vector<Member>& ranks() const { return ranks_; }
  const std::vector<Quiet>& quiet() const { return quiet_; }
  // Returns the global ranks on which no process has reported.
  const std::set<int64_t>& missing() const { return missing_; }
  // Returns the hosts that have not answered, if ranks are missing. Otherwise returns none, since
  // the store also names hosts that have left the job.
  std::vector<UnreachedHost> unreached() const;

  // Return what is known of a rank of the group that is not among its `members`. quietOf(): the
  // process, if it does not answer. elsewhere(): the rank, if it answers but has no such group.
  // Both are null otherwise. silentOf(): the same in words.
  const Quiet* quietOf(uint64_t id, int64_t rank) const;
  const Member* elsewhere(int64_t rank) const;
  Silent silentOf(uint64_t id, int64_t rank) const;

 private:
  void findJob();
  void take(const ProcessStatus& process);
  bool isOfJob(const ProcessStatus& process) const;
  void addProcess(const ProcessStatus& process);
  void addSilent(const HostStatus& host, const SilentProcess& silent);
  void noteMissing();
  void noteUnused();
  std::optional<Finding> judge(const Group& group) const;

  const std::vector<HostStatus>& hosts_;
  const std::vector<UnreachedHost>& unreached_;
  const JobQuestion& question_;
  std::string store_;
  std::string run_;
  std::string version_;
  std::set<uint64_t> job_;  // ids of its groups
  std::map<uint64_t, Group> groups_;
  std::vector<Member> ranks_;
  std::map<std::pair<uint64_t, int64_t>, Quiet> silent_;  // by group and rank
  std::vector<Quiet> quiet_;
  std::set<int64_t> missing_;
  std::set<uint64_t> unused_;  // ids of groups
  bool healthy_ = true;
};

}  // namespace torchcomms_pg::status
