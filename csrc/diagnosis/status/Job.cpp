#include "diagnosis/status/Job.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <ranges>
#include <tuple>

#include "base/Text.hpp"
#include "diagnosis/hang/Parting.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg::status {

namespace {

// Number of ranks whose places a line gives.
constexpr size_t kMostNamed = 3;
constexpr size_t kMostPlaces = 8;  // of a wait for a key

std::string pythonOf(const ProcessStatus& process) {
  if (process.pythonSilentMs < 0) {
    return process.threads;
  }
  return "its Python has not answered for " + aboutSeconds(process.pythonSilentMs) +
         ": a thread keeps the GIL" +
         (process.gilIsHeld ? ", most likely in native code"
                            : ", most likely in native code, or the process gets no core") +
         (process.threads.empty() ? "" : "; Python's stacks:\n" + process.threads);
}

// Returns Python's place of the process's main thread.
std::string mainLineOf(const ProcessStatus& process) {
  const auto text = pythonOf(process);
  const auto line = text.substr(0, text.find('\n'));
  const auto name = line.find(": ");
  return process.pythonSilentMs < 0 && name != std::string::npos ? line.substr(name + 2)
                                                                 : "an unknown line: " + line;
}

// Returns where the rank's main thread is: the line in which it called the oldest operation that it
// is in, or Python's place.
std::string lineOf(const Job::Member& member) {
  const auto& ops = member.told->ops;
  const auto in = std::ranges::find(ops, Stand::inCall, &OpInFlight::stand);
  if (in != ops.end() && !in->calledAt.empty()) {
    return in->calledAt + ", in " + in->text;
  }
  return mainLineOf(*member.process);
}

// Returns the line that a wait was called at.
std::string lineOf(const OtherWait& wait, const ProcessStatus& process) {
  return wait.calledAt.empty() ? mainLineOf(process) : wait.calledAt;
}

// Returns whether the operation tells where its rank is. A message for which nothing waits does
// not.
bool isShown(const OpInFlight& op) {
  return op.waits || op.wait.messages.empty();
}

RankStatus statusOf(int rank, const Job::Member& member) {
  RankStatus status;
  status.rank = rank;
  const auto& told = *member.told;
  if (const auto shown = std::ranges::find_if(told.ops, isShown); shown != told.ops.end()) {
    setCurrent(status, *shown);
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
  status.mainThread = member.activity->mainThread;
  return status;
}

}  // namespace

std::string nameOfHost(const std::string& place) {
  return printable(place.substr(0, place.find('/')));
}

Job::Job(const JobAnswers& answers) : unreached_(answers.unreached), question_(answers.question) {
  Roll roll(question_);
  std::ranges::for_each(answers.hosts, [&](const auto& host) { roll.add(host); });
  for (const auto& host : answers.hosts) {
    for (const auto& process : host.processes) {
      if (roll.isAsked(host, process)) {
        asked_ = process;
      }
      if (roll.includes(process)) {
        addProcess(process);
      }
    }
    for (const auto& silent : host.silent) {
      addSilent(roll, host, silent);
    }
  }
  for (auto& [id, group] : groups_) {
    group.waits = judge(group);
    healthy_ = healthy_ && !group.waits;
  }
  noteMissing();
  noteUnused();
  judgeOtherWaits();
  healthy_ = healthy_ && otherWaits_.empty();
}

std::vector<const Job::Group*> Job::groups() const {
  std::vector<const Group*> sorted;
  for (const auto& [id, group] : groups_) {
    if (!isUnused(id)) {
      sorted.push_back(&group);
    }
  }
  std::ranges::sort(sorted, {}, [](const auto* group) {
    const auto& any = *group->any;
    return std::tuple(-std::ssize(any.ranks), any.ranks, any.name, any.key);
  });
  return sorted;
}

std::vector<UnreachedHost> Job::unreached() const {
  return missing_.empty() ? std::vector<UnreachedHost>() : unreached_;
}

void Job::addProcess(const ProcessStatus& process) {
  for (const auto& activity : process.ranks) {
    ranks_.push_back({&process, &activity, nullptr});
    for (const auto& told : activity.groups) {
      healthy_ = healthy_ && told.failure.empty();
      auto& group = groups_[told.id];
      group.id = told.id;
      group.any = group.any == nullptr ? &told : group.any;
      group.members[told.rank] = {&process, &activity, &told};
    }
  }
}

void Job::addSilent(const Roll& roll, const HostStatus& host, const SilentProcess& silent) {
  bool ours = false;
  for (const auto& each : silent.memberships) {
    if (roll.includes(each.group)) {
      ours = true;
      silent_[{each.group, each.rank}] = {&host, &silent};
    }
  }
  if (ours) {
    healthy_ = false;
    quiet_.push_back({&host, &silent});
  }
}

// Notes the ranks whose processes are not known.
void Job::noteMissing() {
  for (const auto& [id, group] : groups_) {
    missing_.insert(group.any->ranks.begin(), group.any->ranks.end());
  }
  for (const auto& rank : ranks_) {
    missing_.erase(rank.activity->rank);
  }
  for (const auto& [key, silent] : silent_) {
    missing_.erase(key.second);
  }
  healthy_ = healthy_ && missing_.empty();
}

void Job::noteUnused() {
  const auto isPartOf = [](const MemberStatus& one, const MemberStatus& other) {
    return one.queues && !other.queues && one.name == other.name && one.ranks == other.ranks;
  };
  for (const auto& [id, group] : groups_) {
    const bool used = std::ranges::any_of(group.members, [](const auto& member) {
      const auto& told = *member.second.told;
      return told.inFlight > 0 || !told.lastCompleted.text.empty() || !told.failure.empty();
    });
    if (!used && std::ranges::any_of(groups_, [&](const auto& other) {
          return isPartOf(*group.any, *other.second.any);
        })) {
      unused_.insert(id);
    }
  }
}

void Job::judgeOtherWaits() {
  std::map<std::string, std::map<int64_t, const OtherWait*>> byText;
  std::map<const OtherWait*, const ProcessStatus*> processes;
  for (const auto& rank : ranks_) {
    for (const auto& wait : rank.process->otherWaits) {
      byText[wait.text][rank.activity->rank] = &wait;
      processes[&wait] = rank.process;
    }
  }
  const auto least = std::max(question_.lateMs, question_.tookMs);
  for (const auto& [text, waiting] : byText) {
    const auto& [first, longest] =
        *std::ranges::max_element(waiting, {}, [](const auto& each) { return each.second->ageMs; });
    WaitElsewhere found{text, longest->ageMs, {}, {}, ""};
    std::set<int64_t> missing;
    for (const auto& [rank, wait] : waiting) {
      found.there.push_back(rank);
      missing.insert(wait->ranks.begin(), wait->ranks.end());
    }
    if (longest->meets) {
      std::erase_if(missing, [&](int64_t rank) { return waiting.contains(rank); });
    }
    found.waitsFor.assign(missing.begin(), missing.end());
    const bool ofStore = longest->ranks.empty();
    if (longest->ageMs < least || (missing.empty() && !ofStore)) {
      continue;
    }
    found.verdict =
        text + ", begun " + aboutSeconds(longest->ageMs) + " ago on " + namedRanks(found.there) +
        (ofStore ? ": no process has set it"
                 : (longest->meets ? ": " : ", waits for ") + namedRanks(found.waitsFor) +
                       (!longest->meets              ? ""
                        : found.waitsFor.size() == 1 ? " has not come"
                                                     : " have not come"));
    for (const auto rank : found.waitsFor) {
      const auto* const known = elsewhere(rank);
      if (known == nullptr && longest->meeting != 0) {
        continue;  // it has not arrived, or is on another host
      }
      const bool otherName =
          longest->meets && known != nullptr &&
          std::ranges::any_of(known->process->otherWaits, [&](const auto& other) {
            return other.meets && other.ranks == longest->ranks;
          });
      found.verdict += "\n  rank " + std::to_string(rank) + ": " + placeOf(rank) +
                       (otherName ? "; these are the same ranks under another name: all ranks have "
                                    "to make the same groups in the same order"
                                  : "");
    }
    std::map<std::string, std::vector<int64_t>> places;
    for (const auto& [rank, wait] : waiting) {
      if (!missing.contains(rank)) {
        places["called at " + lineOf(*wait, *processes.at(wait))].push_back(rank);
      }
    }
    for (const auto& rank : ranks_) {
      if (ofStore && !waiting.contains(rank.activity->rank) && places.size() < kMostPlaces) {
        places[placeOf(rank.activity->rank)].push_back(rank.activity->rank);
      }
    }
    for (const auto& [place, ranks] : places) {
      found.verdict += "\n  " + namedRanks(ranks) + ": " + place;
    }
    found.verdict = printable(found.verdict);
    otherWaits_.push_back(std::move(found));
  }
  std::ranges::sort(
      otherWaits_, {}, [](const auto& wait) { return std::pair(-wait.ageMs, wait.text); });
}

// Returns where a rank is, for people: in its longest wait or its oldest operation, with its line,
// or Python's place.
std::string Job::placeOf(int64_t rank) const {
  const auto* const known = elsewhere(rank);
  if (known == nullptr) {
    const auto quiet = std::ranges::find_if(quiet_, [rank](const auto& each) {
      return std::ranges::any_of(
          each.process->memberships, [rank](const auto& in) { return in.rank == rank; });
    });
    return quiet == quiet_.end() ? silentOf(0, rank).text : quiet->process->text;
  }
  const auto& waits = known->process->otherWaits;
  if (!waits.empty()) {
    const auto& longest = *std::ranges::max_element(waits, {}, &OtherWait::ageMs);
    return "in " + longest.text + " since " + aboutSeconds(longest.ageMs) + ", called at " +
           lineOf(longest, *known->process);
  }
  std::string text;
  for (const auto& group : known->activity->groups) {
    if (text.empty() && !group.ops.empty()) {
      const auto& op = group.ops.front();
      text = "in " + op.text + " of group '" + group.name + "' since " + aboutSeconds(op.ageMs) +
             (op.calledAt.empty() ? "" : ", called at " + op.calledAt);
    }
  }
  return text.empty() ? "in no operation\n      " + pythonOf(*known->process) : text;
}

const Job::Quiet* Job::quietOf(uint64_t id, int64_t rank) const {
  const auto found = silent_.find({id, rank});
  return found == silent_.end() ? nullptr : &found->second;
}

const Job::Member* Job::elsewhere(int64_t rank) const {
  const auto found = std::ranges::find_if(
      ranks_, [rank](const auto& known) { return known.activity->rank == rank; });
  return found == ranks_.end() ? nullptr : &*found;
}

Silent Job::silentOf(uint64_t id, int64_t rank) const {
  if (const auto* const quiet = quietOf(id, rank)) {
    return {quiet->process->text, quiet->process->state != "silent"};
  }
  if (const auto* const other = elsewhere(rank)) {
    return {
        "has no such group (pid " + std::to_string(other->process->pid) +
        "): it has destroyed it, or has not made it yet"};
  }
  return {
      unreached_.empty() ? "no process tells of it: it is of another user, or has ended, or its "
                           "group is not there any more"
                         : "no process tells of it: it may be on a host that has not answered"};
}

// Diagnoses the group's oldest awaited operation, or its oldest one if none is awaited. Returns
// nullopt if no operation is late, or if that operation may have ended.
std::optional<Job::Finding> Job::judge(const Group& group) const {
  // An operation of at least this age was issued before the first rank was asked.
  const auto least = std::max(question_.lateMs, question_.tookMs);
  Finding finding;
  const auto rankOf = [](const OpInFlight& op) { return std::pair(op.waits, op.ageMs); };
  for (const auto& [rank, member] : group.members) {
    for (const auto& op : member.told->ops) {
      if (isShown(op) && op.ageMs >= least &&
          (finding.op == nullptr || rankOf(op) > rankOf(*finding.op))) {
        finding.rank = rank;
        finding.op = &op;
      }
    }
  }
  if (finding.op == nullptr) {
    return std::nullopt;
  }
  finding = judge(group, finding.rank, *finding.op);
  if (finding.op->endsUnseen && finding.verdict.extensionMs > 0 &&
      finding.verdict.missing.empty()) {
    return std::nullopt;  // a message whose ranks have arrived, and which may have ended
  }
  return finding;
}

Job::Finding Job::judge(const Group& group, int asking, const OpInFlight& op) const {
  Answers answers;
  SilentRanks silent;
  const auto& ranks = group.any->ranks;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (const auto found = group.members.find(rank); found != group.members.end()) {
      answers.emplace(rank, statusOf(rank, found->second));
    } else {
      silent.emplace(rank, silentOf(group.id, ranks[rank]));
    }
  }
  DiagnosisRequest request;
  request.rank = asking;
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
  Finding finding{asking, &op, torchcomms_pg::judge(request, answers, silent)};
  for (const auto& [rank, member] : group.members) {
    if (finding.verdict.parting.empty() && finding.verdict.extensionMs == 0) {
      addParting(finding.verdict, member.told->parting);
    }
  }
  return finding;
}

std::string Job::heldUpBy(const Group& group, const Finding& finding) const {
  const auto& verdict = finding.verdict;
  if (verdict.ranks.empty()) {
    const auto& why = verdict.extensionMs > 0 ? verdict.text : verdict.summary;
    return why.empty() ? "" : ": " + why;
  }
  std::string text;
  for (const int rank : verdict.ranks | std::views::take(kMostNamed)) {
    const auto global = group.any->ranks.at(rank);
    const auto found = group.members.find(rank);
    text += (text.empty() ? "for rank " : "; for rank ") + std::to_string(global) +
            (found == group.members.end() ? ": " + silentOf(group.id, global).text
                                          : ", at " + lineOf(found->second));
  }
  if (verdict.ranks.size() > kMostNamed) {
    text += "; and for " + std::to_string(verdict.ranks.size() - kMostNamed) + " more ranks";
  }
  return " " + printable(text);
}

}  // namespace torchcomms_pg::status
