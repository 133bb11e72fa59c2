// What the processes of a job have told, put together: who is in which group, and who waits for
// whom, by the rule of blame.
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

// A host whose processes have not told theirs.
struct UnreachedHost {
  std::string host;
  std::string why;
};

struct JobQuestion {
  uint32_t pid = 0;    // of the process that was asked: the job is that of its groups
  std::string host;    // its host
  int64_t lateMs = 0;  // an operation that is older is waited for
  int64_t tookMs = 0;  // time in which the answers were given
};

// Returns the host's name, without what tells it from others of that name.
std::string nameOfHost(const std::string& place);

// Refers to what it was made of. Of an operation that was issued while the answers were collected
// nothing is said: its ranks have told of different times.
class Job {
 public:
  // What is known of the rank of a group.
  struct Member {
    const ProcessStatus* process = nullptr;
    const RankActivity* activity = nullptr;
    const MemberStatus* told = nullptr;
  };

  // What was found out about a group's oldest operation.
  struct Finding {
    int rank = 0;  // the one that waits longest
    const OpInFlight* op = nullptr;
    Verdict verdict;
  };

  struct Group {
    uint64_t id = 0;
    const MemberStatus* any = nullptr;  // one member's, for what all have in common
    std::map<int, Member> members;      // those that have answered, by rank in the group
    std::optional<Finding> waits;       // none: nobody waits for long
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
  // Returns the groups, the largest first, but for those that are unused.
  std::vector<const Group*> groups() const;
  // Returns whether it is the part of a group on a device on which no rank has issued anything. A
  // group of Gloo, as an example, has one for CUDA also where there is none.
  bool isUnused(uint64_t id) const { return unused_.contains(id); }
  // Returns the ranks that answer; one that is in no group has no `told`.
  const std::vector<Member>& ranks() const { return ranks_; }
  const std::vector<Quiet>& quiet() const { return quiet_; }
  // Returns the ranks of which nobody tells.
  const std::set<int64_t>& missing() const { return missing_; }
  // Returns the hosts that have not answered, where that is why ranks are missing: the store also
  // names hosts that have left the job.
  std::vector<UnreachedHost> unreached() const;

  // Return what is known of a rank of the group that is none of its members: the process that does
  // not answer, the rank that does, but has no such group, or null; and that in words.
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
