// A process's report of its status: fields for the rule of blame (diagnosis/rank/RankStatus.hpp),
// and fields for people. Independent of torch.
#pragma once

#include <cstdint>
#include <optional>
#include <ranges>
#include <string>
#include <vector>

#include "diagnosis/lateness/Lateness.hpp"
#include "diagnosis/rank/RankStatus.hpp"
#include "diagnosis/status/Folder.hpp"

namespace torchcomms_pg::status {

// An operation that has not ended.
struct OpInFlight {
  std::string text;
  uint64_t seq = 0;       // number among the group's collectives; 0 if not a collective
  std::string signature;  // see RankStatus
  int64_t ageMs = 0;      // time since its issue
  int64_t timeoutMs = 0;  // the operation's timeout
  bool waits = false;     // a thread, a queue or the holder of a future may wait for its end
  Stand stand = Stand::issued;
  bool endsUnseen = false;  // may have ended unnoticed if all ranks have arrived
  std::string calledAt;     // the line of Python that issued it; may be empty
  Wait wait;

  static void fields(auto& self, auto& visit) {
    visit(
        self.text, self.seq, self.signature, self.ageMs, self.timeoutMs, self.waits, self.stand,
        self.endsUnseen, self.calledAt, self.wait);
  }
};

// Sets what a status says of the operation that its rank is in.
void setCurrent(RankStatus& status, const OpInFlight& op);

// Kinds of collectives that are counted separately: the five kinds that NCCL's RAS counts, four
// more kinds, and the rest, such as batches.
inline constexpr const char* kLaunchKinds[] = {
    "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce",
    "AlltoAll",  "Gather", "Scatter",   "Barrier",       "Other"};

// A rank's part in a group.
struct MemberStatus {
  uint64_t id = 0;   // unique among the groups of all jobs
  uint64_t key = 0;  // see GroupCounts; 0 if several groups of the rank cannot be distinguished
  std::string name;
  std::string description;
  std::string backend;
  int rank = 0;                // in the group
  std::vector<int64_t> ranks;  // global ranks, by rank in the group; sent as `runs`
  std::vector<Run> runs;
  bool queues = false;             // true if operations are queued on a device
  uint64_t collectives = 0;        // number of collectives that have ended
  std::vector<uint64_t> launched;  // numbers of issued collectives, by kLaunchKinds
  CompletedOp lastCompleted;
  std::string failure;    // reason why the group has failed on this rank, or ""
  int64_t relaxedMs = 0;  // see RankStatus
  uint64_t inFlight = 0;  // number of operations; `ops` has the oldest and awaited ones
  std::vector<OpInFlight> ops;
  std::string parting;  // of a standing verdict, see Verdict; or ""
  Lateness lateness;    // this rank's latest judgement of the group; empty before

  static void fields(auto& self, auto& visit) {
    visit(
        self.id, self.key, self.name, self.description, self.backend, self.rank, self.runs,
        self.queues, self.collectives, self.launched, self.lastCompleted, self.failure,
        self.relaxedMs, self.inFlight, self.ops, self.parting, self.lateness);
  }
};

// A rank of the job: a process, or a thread if the ranks are threads of one process.
struct RankActivity {
  int64_t rank = 0;  // global rank
  std::vector<MemberStatus> groups;
  std::vector<GroupCounts> counts;  // see RankStatus
  uint64_t mainThread = 0;          // see RankStatus

  static void fields(auto& self, auto& visit) {
    visit(self.rank, self.groups, self.counts, self.mainThread);
  }
};

// A wait for other ranks that is no operation of a group, such as in new_group.
struct OtherWait {
  std::string text;            // equal on all ranks that meet
  std::vector<int64_t> ranks;  // global ranks that are waited for; none for a key of a store
  bool meets = false;          // true if each of `ranks` has to come to the same wait
  int64_t ageMs = 0;
  std::string calledAt;  // line of Python; "" if it is where the main thread is
  // Number that the processes of a meeting without a group share; 0 if they have groups. `self`:
  // this process's rank in the meeting.
  uint64_t meeting = 0;
  int64_t self = -1;

  static void fields(auto& self, auto& visit) {
    visit(self.text, self.ranks, self.meets, self.ageMs, self.calledAt, self.meeting, self.self);
  }
};

struct ProcessStatus {
  uint32_t pid = 0;
  std::string host;
  std::string version;          // of torchcomms_pg
  std::string store;            // address of the job's store, such as "127.0.0.1:29500"
  std::string run;              // id of the run from the launcher; may be empty
  std::string threads;          // where Python's threads are, one line each
  int64_t pythonSilentMs = -1;  // time since Python was asked; -1 if it has answered
  bool gilIsHeld = false;       // true if another thread certainly keeps it from answering
  int64_t compilingMs = -1;     // see RankStatus
  int64_t compiledMs = -1;
  std::vector<RankActivity> ranks;
  std::vector<OtherWait> otherWaits;

  static void fields(auto& self, auto& visit) {
    visit(
        self.pid, self.host, self.version, self.store, self.run, self.threads, self.pythonSilentMs,
        self.gilIsHeld, self.compilingMs, self.compiledMs, self.ranks, self.otherWaits);
  }
};

// Returns the groups of all ranks of a process.
auto groupsOf(auto& process) {
  return process.ranks | std::views::transform(&RankActivity::groups) | std::views::join;
}

// A process that has a socket in the folder, but does not answer.
struct SilentProcess {
  uint32_t pid = 0;
  std::string text;   // what is known of it, for people
  std::string state;  // "stopped", "dead" or "silent"
  std::vector<Membership> memberships;

  static void fields(auto& self, auto& visit) {
    visit(self.pid, self.text, self.state, self.memberships);
  }
};

// The processes of one host.
struct HostStatus {
  std::string host;
  std::vector<ProcessStatus> processes;
  std::vector<SilentProcess> silent;

  static void fields(auto& self, auto& visit) { visit(self.host, self.processes, self.silent); }
};

// A host whose processes have not reported.
struct UnreachedHost {
  std::string host;
  std::string why;

  static void fields(auto& self, auto& visit) { visit(self.host, self.why); }
};

struct JobQuestion {
  uint32_t pid = 0;    // the asked process, whose groups define the job
  std::string host;    // the asked process's host, as ownPlace() returns it
  int64_t lateMs = 0;  // an operation of at least this age counts as late
  int64_t tookMs = 0;  // time from the first question to the last answer

  static void fields(auto& self, auto& visit) {
    visit(self.pid, self.host, self.lateMs, self.tookMs);
  }
};

// What the processes of the job have reported.
struct JobAnswers {
  std::vector<HostStatus> hosts;
  std::vector<UnreachedHost> unreached;
  JobQuestion question;

  static void fields(auto& self, auto& visit) { visit(self.hosts, self.unreached, self.question); }
};

// Encode and decode. Decoding returns nullopt if `text` is damaged or of another version.
// The ranks of a group are encoded once, as runs.
std::string encode(ProcessStatus status);
std::optional<ProcessStatus> decodeProcess(const std::string& text);
std::string encode(HostStatus status);
std::optional<HostStatus> decodeHost(const std::string& text);
std::string encode(JobAnswers answers);
std::optional<JobAnswers> decodeAnswers(const std::string& text);

}  // namespace torchcomms_pg::status
