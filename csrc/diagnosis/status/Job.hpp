// Combines the reports of a job's processes: which rank is in which group, and which rank waits for
// which, by the rule of blame (diagnosis/hang/Blame.hpp).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "diagnosis/hang/Verdict.hpp"
#include "diagnosis/status/ProcessStatus.hpp"
#include "diagnosis/status/Roll.hpp"

namespace torchcomms_pg::status {

// Returns the host's name, without the boot and namespace that ownPlace() adds.
std::string nameOfHost(const std::string& place);

// A job, by the reports of its processes. Keeps a reference to `answers`. Diagnoses no operation
// that was issued while the answers were collected, since ranks report at different times.
class Job {
 public:
  // What is known of one rank of a group.
  struct Member {
    const ProcessStatus* process = nullptr;
    const RankActivity* activity = nullptr;
    const MemberStatus* told = nullptr;
  };

  // The diagnosis of a group's oldest awaited operation, or of its oldest one if none is awaited.
  struct Finding {
    int rank = 0;  // rank of the group that has issued the operation
    const OpInFlight* op = nullptr;
    Verdict verdict;
  };

  struct Group {
    uint64_t id = 0;
    const MemberStatus* any = nullptr;  // one member's status, read for what all members share
    std::map<int, Member> members;      // members that have answered, by rank in the group
    std::optional<Finding> waits;       // nullopt if no operation is late
  };

  // A wait that is no operation of a group, in which one rank or several have been for long.
  struct WaitElsewhere {
    std::string text;
    int64_t ageMs = 0;              // of the rank that has waited longest
    std::vector<int64_t> there;     // global ranks that are in this wait
    std::vector<int64_t> waitsFor;  // global ranks that are missing, or are waited for
    std::string verdict;            // for people
  };

  // A process that does not answer, and its host.
  struct Quiet {
    const HostStatus* host = nullptr;
    const SilentProcess* process = nullptr;
  };

  explicit Job(const JobAnswers& answers);

  const JobQuestion& question() const { return question_; }
  // Returns the status of the asked process, with empty texts if it has not answered.
  const ProcessStatus& asked() const { return asked_; }
  bool healthy() const { return healthy_; }
  // Returns the groups without the unused ones, largest first.
  std::vector<const Group*> groups() const;
  // Returns whether the group is a c10d group's part for an accelerator that no rank has used. For
  // example, a group in the place of Gloo has a part for CUDA even on hosts without CUDA.
  bool isUnused(uint64_t id) const { return unused_.contains(id); }
  // Returns the ranks that answer, with `told` null.
  const std::vector<Member>& ranks() const { return ranks_; }
  const std::vector<Quiet>& quiet() const { return quiet_; }
  // Returns the global ranks whose processes are not known.
  const std::set<int64_t>& missing() const { return missing_; }
  // Returns the waits of at least the question's age, longest first, without those in which all
  // ranks are.
  const std::vector<WaitElsewhere>& otherWaits() const { return otherWaits_; }
  // Returns the hosts that have not answered; none if no rank is missing, since the store also
  // names hosts that have left the job.
  std::vector<UnreachedHost> unreached() const;

  // Return what is known of a global rank that is not among the `members` of group `id`. quietOf()
  // returns its process if that does not answer, else null. elsewhere() returns the rank if it
  // answers, else null. silentOf() puts either into words, or says that neither is known.
  const Quiet* quietOf(uint64_t id, int64_t rank) const;
  const Member* elsewhere(int64_t rank) const;
  Silent silentOf(uint64_t id, int64_t rank) const;

  // Returns the diagnosis of `op`, which a rank of the group has issued.
  Finding judge(const Group& group, int rank, const OpInFlight& op) const;
  // Returns whom an operation waits for and where these ranks are, as the rest of a line that ends
  // "has waited 14 s", or "" if that is not known.
  std::string heldUpBy(const Group& group, const Finding& finding) const;

 private:
  void addProcess(const ProcessStatus& process);
  void addSilent(const Roll& roll, const HostStatus& host, const SilentProcess& silent);
  void noteMissing();
  void noteUnused();
  std::optional<Finding> judge(const Group& group) const;
  void judgeOtherWaits();
  std::string placeOf(int64_t rank) const;

  const std::vector<UnreachedHost>& unreached_;
  const JobQuestion& question_;
  ProcessStatus asked_;
  std::map<uint64_t, Group> groups_;
  std::vector<Member> ranks_;
  std::map<std::pair<uint64_t, int64_t>, Quiet> silent_;  // by group's id and global rank
  std::vector<Quiet> quiet_;
  std::set<int64_t> missing_;
  std::set<uint64_t> unused_;  // ids of groups
  std::vector<WaitElsewhere> otherWaits_;
  bool healthy_ = true;
};

}  // namespace torchcomms_pg::status
