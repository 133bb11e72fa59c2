#include "status/JobReport.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "monitor/Printable.hpp"
#include "monitor/Verdict.hpp"
#include "status/Json.hpp"

namespace torchcomms_pg::status {

namespace {

double seconds(int64_t milliseconds) {
  return static_cast<double>(milliseconds) / 1000;
}

std::vector<std::string> linesOf(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    lines.push_back(printable(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return lines;
}

std::string tenths(int64_t milliseconds) {
  return std::to_string(milliseconds / 1000) + "." + std::to_string(milliseconds / 100 % 10) + " s";
}

// Returns the host's name, without what tells it from others of that name.
std::string nameOf(const std::string& place) {
  return printable(place.substr(0, place.find('/')));
}

// What is known of the rank of a group.
struct Member {
  const ProcessStatus* process = nullptr;
  const RankActivity* activity = nullptr;
  const MemberStatus* told = nullptr;
};

struct Group {
  const MemberStatus* any = nullptr;  // one member's, for what all have in common
  std::map<int, Member> members;      // those that have answered, by rank in the group
};

// What was found out about a group's oldest operation.
struct Finding {
  int rank = 0;  // the one that waits longest
  const OpInFlight* op = nullptr;
  Verdict verdict;
};

class Report {
 public:
  Report(
      const std::vector<HostStatus>& hosts,
      const std::vector<UnreachedHost>& unreached,
      const JobQuestion& question)
      : hosts_(hosts), unreached_(unreached), question_(question) {
    findJob();
    for (const auto& host : hosts) {
      for (const auto& process : host.processes) {
        if (isOfJob(process)) {
          addProcess(process);
        }
      }
      for (const auto& silent : host.silent) {
        addSilent(host, silent);
      }
    }
  }

  std::string write() {
    for (const auto& [id, group] : groups_) {
      if (auto finding = judge(id, group)) {
        healthy_ = false;
        findings_.emplace(id, std::move(*finding));
      }
    }
    noteMissing();
    Json json;
    json.object([&] {
      json.field("version", 1);
      json.objectField("asked", [&] {
        json.field("pid", question_.pid);
        json.field("host", nameOf(question_.host));
      });
      json.field("store", printable(store_));
      json.field("run_id", printable(run_));
      json.field("healthy", healthy_);
      json.field("late_after_s", seconds(question_.lateMs));
      json.field("took_s", seconds(question_.tookMs));
      // The store also names hosts that have left the job.
      json.listField("unreached_hosts", [&] {
        for (const auto& each : missing_.empty() ? std::vector<UnreachedHost>() : unreached_) {
          json.objectElement([&] {
            json.field("host", nameOf(each.host));
            json.field("why", printable(each.why));
          });
        }
      });
      json.listField("groups", [&] { writeGroups(json); });
      json.listField("ranks", [&] { writeRanks(json); });
    });
    return json.take();
  }

 private:
  // Finds the groups of the job: those of the asked process, and all that share a process.
  void findJob() {
    std::vector<const ProcessStatus*> others;
    for (const auto& host : hosts_) {
      for (const auto& process : host.processes) {
        if (process.pid == question_.pid && host.host == question_.host) {
          take(process);
          store_ = process.store;
          run_ = process.run;
        } else {
          others.push_back(&process);
        }
      }
    }
    for (bool grew = true; grew;) {
      grew = std::erase_if(others, [&](const auto* process) {
               return isOfJob(*process) && (take(*process), true);
             }) > 0;
    }
  }

  void take(const ProcessStatus& process) {
    for (const auto& rank : process.ranks) {
      for (const auto& group : rank.groups) {
        job_.insert(group.id);
      }
    }
  }

  bool isOfJob(const ProcessStatus& process) const {
    return std::ranges::any_of(process.ranks, [&](const auto& rank) {
      return std::ranges::any_of(
          rank.groups, [&](const auto& group) { return job_.contains(group.id); });
    });
  }

  void addProcess(const ProcessStatus& process) {
    for (const auto& activity : process.ranks) {
      ranks_.push_back({&process, &activity, nullptr});
      for (const auto& told : activity.groups) {
        healthy_ = healthy_ && told.failure.empty();
        auto& group = groups_[told.id];
        group.any = group.any == nullptr ? &told : group.any;
        group.members[told.rank] = {&process, &activity, &told};
      }
    }
  }

  void addSilent(const HostStatus& host, const SilentProcess& silent) {
    bool ours = false;
    for (const auto& each : silent.memberships) {
      if (job_.contains(each.group)) {
        ours = true;
        silent_[{each.group, each.rank}] = &silent;
      }
    }
    if (ours) {
      healthy_ = false;
      quiet_.emplace_back(&host, &silent);
    }
  }

  // Notes the ranks of which nobody tells.
  void noteMissing() {
    std::set<int64_t> known;
    for (const auto& rank : ranks_) {
      known.insert(rank.activity->rank);
    }
    for (const auto& [key, silent] : silent_) {
      known.insert(key.second);
    }
    for (const auto& [id, group] : groups_) {
      for (const auto rank : group.any->ranks) {
        if (!known.contains(rank)) {
          missing_.insert(rank);
        }
      }
    }
    healthy_ = healthy_ && missing_.empty();
  }

  static std::string pythonOf(const ProcessStatus& process) {
    if (process.pythonSilentMs < 0) {
      return process.threads;
    }
    return "its Python has not answered for " + tenths(process.pythonSilentMs) +
           ": a thread keeps the GIL, most likely in native code, or the process gets no core" +
           (process.threads.empty() ? "" : "; Python's stacks:\n" + process.threads);
  }

  static RankStatus statusOf(int rank, const Member& member) {
    RankStatus status;
    status.rank = rank;
    const auto& told = *member.told;
    if (!told.ops.empty()) {
      const auto& oldest = told.ops.front();
      status.current = oldest.text;
      status.currentSeq = oldest.signature.empty() ? 0 : oldest.seq;
      status.signature = oldest.signature;
      status.waitedMs = oldest.ageMs;
      status.calledAt = oldest.calledAt;
    }
    status.completed = told.lastCompleted;
    status.failure = told.failure;
    status.threads = pythonOf(*member.process);
    status.compilingMs = member.process->compilingMs;
    status.compiledMs = member.process->compiledMs;
    status.relaxedMs = told.relaxedMs;
    for (const auto& group : member.activity->groups) {
      for (const auto& op : group.ops) {
        if (op.waits) {
          status.waits.push_back(op.wait);
        }
      }
    }
    status.counts = member.activity->counts;
    return status;
  }

  Silent silentOf(uint64_t id, int64_t rank) const {
    if (const auto found = silent_.find({id, rank}); found != silent_.end()) {
      return {found->second->text, found->second->state != "silent"};
    }
    const auto other = std::ranges::find_if(
        ranks_, [rank](const auto& known) { return known.activity->rank == rank; });
    if (other != ranks_.end()) {
      return {
          "has no such group (pid " + std::to_string(other->process->pid) +
          "): it has destroyed it, or has not made it yet"};
    }
    return {
        unreached_.empty() ? "no process tells of it: it is of another user, or has ended, or its "
                             "group is not there any more"
                           : "no process tells of it: it may be on a host that has not answered"};
  }

  // Finds out who holds up the group's oldest operation; none: none is old.
  std::optional<Finding> judge(uint64_t id, const Group& group) const {
    // Whatever is older was issued before the first rank was asked.
    const auto least = std::max(question_.lateMs, question_.tookMs);
    Finding finding;
    const auto rankOf = [](const OpInFlight& op) { return std::pair(op.waits, op.ageMs); };
    for (const auto& [rank, member] : group.members) {
      for (const auto& op : member.told->ops) {
        if (op.ageMs >= least && (finding.op == nullptr || rankOf(op) > rankOf(*finding.op))) {
          finding.rank = rank;
          finding.op = &op;
        }
      }
    }
    if (finding.op == nullptr) {
      return std::nullopt;
    }
    std::map<int, RankStatus> answers;
    std::map<int, Silent> silent;
    const auto& ranks = group.any->ranks;
    for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
      if (const auto found = group.members.find(rank); found != group.members.end()) {
        answers.emplace(rank, statusOf(rank, found->second));
      } else {
        silent.emplace(rank, silentOf(id, ranks[rank]));
      }
    }
    const auto& op = *finding.op;
    DiagnosisRequest request;
    request.rank = finding.rank;
    request.group = group.any->name;
    request.globalRanks = ranks;
    request.size = static_cast<int>(ranks.size());
    request.op = op.text;
    request.seq = op.seq;
    request.signature = op.signature;
    request.wait = op.wait;
    request.timeoutMs = op.timeoutMs;
    request.waitedMs = op.ageMs;
    request.queued = group.any->queues;
    request.mayHaveEnded = op.endsUnseen;
    request.compileLeftMs = std::numeric_limits<int64_t>::max();
    finding.verdict = torchcomms_pg::judge(request, answers, silent);
    if (op.endsUnseen && finding.verdict.extensionMs > 0 && finding.verdict.missing.empty()) {
      return std::nullopt;  // a message that nobody waits for
    }
    return finding;
  }

  std::vector<int64_t> global(const Group& group, const std::vector<int>& ranks) const {
    std::vector<int64_t> numbers;
    for (const int rank : ranks) {
      numbers.push_back(group.any->ranks[rank]);
    }
    return numbers;
  }

  void writeGroups(Json& json) const {
    std::vector<std::pair<uint64_t, const Group*>> sorted;
    for (const auto& [id, group] : groups_) {
      sorted.emplace_back(id, &group);
    }
    std::ranges::sort(sorted, [](const auto& one, const auto& other) {
      const auto& a = *one.second->any;
      const auto& b = *other.second->any;
      return std::tuple(-static_cast<int64_t>(a.ranks.size()), a.ranks, a.name, a.key) <
             std::tuple(-static_cast<int64_t>(b.ranks.size()), b.ranks, b.name, b.key);
    });
    for (const auto& [id, group] : sorted) {
      json.objectElement([&, id = id, group = group] { writeGroup(json, id, *group); });
    }
  }

  void writeGroup(Json& json, uint64_t id, const Group& group) const {
    json.field("id", std::to_string(id));  // beyond the whole numbers of JSON
    json.field("name", printable(group.any->name));
    json.field("description", printable(group.any->description));
    json.field("backend", printable(group.any->backend));
    json.field("ranks", group.any->ranks);
    auto least = std::numeric_limits<uint64_t>::max();
    uint64_t most = 0;
    for (const auto& [rank, member] : group.members) {
      least = std::min(least, member.told->collectives);
      most = std::max(most, member.told->collectives);
    }
    // The numbers of ranks that have told of different times differ also where all is well.
    json.objectField("completed_collectives", [&] {
      json.field("least", least);
      json.field("most", most);
    });
    const auto found = findings_.find(id);
    if (found == findings_.end()) {
      json.field("waits", nullptr);
      return;
    }
    const auto& finding = found->second;
    json.objectField("waits", [&] {
      json.field("rank", group.any->ranks[finding.rank]);
      json.field("operation", printable(finding.op->text));
      json.field("since_s", seconds(finding.op->ageMs));
      json.field("waits_for", global(group, finding.verdict.missing));
      json.field("behind", global(group, finding.verdict.ranks));
      json.field("prolonged", finding.verdict.extensionMs > 0);
      json.field("verdict", printable(finding.verdict.text));
    });
  }

  void writeRanks(Json& json) const {
    auto sorted = ranks_;
    std::ranges::stable_sort(sorted, [](const auto& one, const auto& other) {
      return one.activity->rank < other.activity->rank;
    });
    for (const auto& rank : sorted) {
      json.objectElement([&] { writeRank(json, rank); });
    }
    for (const auto& [host, silent] : quiet_) {
      json.objectElement([&, host = host, silent = silent] {
        std::set<int64_t> numbers;
        for (const auto& each : silent->memberships) {
          numbers.insert(each.rank);
        }
        json.field("rank", *numbers.begin());
        json.field("pid", silent->pid);
        json.field("host", nameOf(host->host));
        json.field("state", silent->state);
        json.field("text", printable(silent->text));
      });
    }
    for (const auto rank : missing_) {
      json.objectElement([&] {
        json.field("rank", rank);
        json.field("state", "unknown");
        json.field("text", silentOf(0, rank).text);
      });
    }
  }

  // Writes what a rank tells. Its lateness, once that is known, goes beside "compiling_s".
  void writeRank(Json& json, const Member& rank) const {
    const auto& process = *rank.process;
    json.field("rank", rank.activity->rank);
    json.field("pid", process.pid);
    json.field("host", printable(process.host));
    json.field("state", "answers");
    if (process.compilingMs >= 0) {
      json.field("compiling_s", seconds(process.compilingMs));
    } else {
      json.field("compiling_s", nullptr);
    }
    json.objectField("python", [&] {
      if (process.pythonSilentMs >= 0) {
        json.field("silent_s", seconds(process.pythonSilentMs));
      } else {
        json.field("silent_s", nullptr);
      }
      json.field("threads", linesOf(process.threads));
    });
    json.listField("groups", [&] {
      for (const auto& group : rank.activity->groups) {
        json.objectElement([&] { writeMember(json, group); });
      }
    });
  }

  static void writeMember(Json& json, const MemberStatus& group) {
    json.field("id", std::to_string(group.id));
    json.field("name", printable(group.name));
    json.field("rank", group.rank);
    json.field("completed_collectives", group.collectives);
    json.field("last_completed", printable(group.lastCompleted));
    json.field("failure", printable(group.failure));
    json.field("in_flight", group.inFlight);
    json.listField("oldest", [&] {
      for (const auto& op : group.ops) {
        json.objectElement([&] {
          json.field("operation", printable(op.text));
          json.field("since_s", seconds(op.ageMs));
          json.field("awaited", op.waits && !op.wait.indirect);
          json.field("called_at", printable(op.calledAt));
        });
      }
    });
  }

  const std::vector<HostStatus>& hosts_;
  const std::vector<UnreachedHost>& unreached_;
  const JobQuestion& question_;
  std::string store_;
  std::string run_;
  std::set<uint64_t> job_;  // ids of its groups
  std::map<uint64_t, Group> groups_;
  std::vector<Member> ranks_;
  std::map<std::pair<uint64_t, int64_t>, const SilentProcess*> silent_;  // by group and rank
  std::vector<std::pair<const HostStatus*, const SilentProcess*>> quiet_;
  std::set<int64_t> missing_;
  std::map<uint64_t, Finding> findings_;
  bool healthy_ = true;
};

}  // namespace

bool Roll::take(const ProcessStatus& process, bool asked) {
  const auto isOfJob = [&](const auto& rank) {
    return std::ranges::any_of(
        rank.groups, [&](const auto& group) { return job_.contains(group.id); });
  };
  if (!asked && std::ranges::none_of(process.ranks, isOfJob)) {
    return false;
  }
  for (const auto& rank : process.ranks) {
    for (const auto& group : rank.groups) {
      if (job_.insert(group.id).second) {
        for (const auto number : group.ranks) {
          if (!heard_.contains({group.id, number})) {
            wanted_.insert({group.id, number});
          }
        }
      }
    }
  }
  return true;
}

void Roll::add(const HostStatus& host) {
  for (const auto& process : host.processes) {
    for (const auto& rank : process.ranks) {
      for (const auto& group : rank.groups) {
        hear({group.id, group.ranks[group.rank]});
      }
    }
    if (!take(process, process.pid == asked_.pid && host.host == asked_.host)) {
      unconnected_.push_back(process);
    }
  }
  for (const auto& silent : host.silent) {
    for (const auto& each : silent.memberships) {
      hear({each.group, each.rank});
    }
  }
  while (unconnected_.remove_if([&](const auto& process) { return take(process, false); }) > 0) {
  }
}

std::string report(
    const std::vector<HostStatus>& hosts,
    const std::vector<UnreachedHost>& unreached,
    const JobQuestion& question) {
  return Report(hosts, unreached, question).write();
}

}  // namespace torchcomms_pg::status
