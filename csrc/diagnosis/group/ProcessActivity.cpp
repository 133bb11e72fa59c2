#include "diagnosis/group/ProcessActivity.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/StorePlace.hpp"
#include "diagnosis/group/OtherWaits.hpp"
#include "diagnosis/rank/PythonStackDump.hpp"
#include "diagnosis/status/LocalProcesses.hpp"
#include "diagnosis/status/Roll.hpp"
#include "diagnosis/store/JobStore.hpp"
#include "host/Process.hpp"
#include "monitor/Compiling.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"
#include "recorder/RecordedOp.hpp"

namespace torchcomms_pg {

namespace {

// Number of a group's oldest operations that are reported; kMostOps limits these and the awaited
// ones together.
constexpr size_t kOldest = 4;
constexpr size_t kMostOps = 64;

struct Run {
  Mutex mutex;
  std::string id GUARDED_BY(mutex);
};
Run& run = neverDestroyed<Run>();

using Groups = std::vector<std::shared_ptr<GroupActivity>>;

// Returns the groups that are reported.
Groups shown() {
  auto groups = enlisted();
  std::erase_if(groups, [](const auto& group) { return !group->place.load(); });
  return groups;
}

// Releases groups. If this releases the last reference to a group, destroys the group in a separate
// thread, since that may take long.
void letGo(Groups groups) {
  for (auto& each : groups) {
    if (each.use_count() == 1) {
      Monitor::get().runDetached([group = std::move(each)]() mutable { group.reset(); });
    }
  }
}

// Place in the status to which the line of an operation's stack belongs.
struct Line {
  size_t rank;
  size_t group;
  size_t op;
};

// Returns the place in status::kLaunchKinds.
size_t launchKind(OpKind kind) {
  switch (kind) {
    case OpKind::broadcast: return 0;
    case OpKind::reduce: return 1;
    case OpKind::allGather:
    case OpKind::allGatherSingle: return 2;
    case OpKind::reduceScatter:
    case OpKind::reduceScatterSingle: return 3;
    case OpKind::allReduce: return 4;
    case OpKind::allToAll:
    case OpKind::allToAllSingle: return 5;
    case OpKind::gather:
    case OpKind::gatherSingle: return 6;
    case OpKind::scatter: return 7;
    case OpKind::barrier:
    case OpKind::monitoredBarrier: return 8;
    default: return std::size(status::kLaunchKinds) - 1;
  }
}

// Returns the numbers of collectives that the rank has issued, by status::kLaunchKinds. Call with
// the lock of InFlightOps held, so that no collective is missed or counted twice when it ends.
std::vector<uint64_t> launched(const GroupActivity& group, const InFlightOps::List& ops) {
  std::vector<uint64_t> counts(std::size(status::kLaunchKinds), 0);
  for (size_t kind = 0; kind < kOpKinds; ++kind) {
    const auto ended = group.inFlight().totals().sums(static_cast<OpKind>(kind)).operations;
    counts[launchKind(static_cast<OpKind>(kind))] += ended;
  }
  for (const auto& entry : ops) {
    ++counts[launchKind(entry.op->kind)];
  }
  // The last place has messages, too, so far.
  const auto known = std::accumulate(counts.begin(), counts.end() - 1, uint64_t{0});
  const auto all = group.issued().collectives();
  counts.back() = all - std::min(all, known);
  return counts;
}

// Adds the status of a group to `activity`, which is number `place` of the process's ranks. Adds
// the stacks of the group's operations to `stacks`, and their places to `lines`. `known`: no other
// group of the rank has the same key.
void describeMember(
    const GroupActivity& group, bool known, Clock::time_point now, status::RankActivity& activity,
    size_t place, std::vector<std::shared_ptr<const void>>& stacks, std::vector<Line>& lines) {
  status::MemberStatus told;
  told.id = group.place.load()->id;
  told.key = known ? group.key() : 0;
  told.name = group.group().name;
  told.description = group.group().description;
  told.backend = group.group().backend;
  told.rank = group.rank();
  told.ranks = group.globalRanks();
  told.queues = group.queues();
  told.relaxedMs = group.relaxed().count();
  told.failure = group.failureMessage();
  told.parting = group.parting();
  if (const auto judged = group.lateness().judged()) {
    told.lateness = *judged;
  }
  told.collectives = group.issued().collectives();
  // Reads what the group waits for before what it has issued, as for a verdict.
  group.inFlight().inspect([&](const auto& ops, const Operation& lastCompleted) {
    told.inFlight = ops.size();
    told.launched = launched(group, ops);
    for (const auto& entry : ops) {
      const auto& op = *entry.op;
      if (op.collective && op.seq <= told.collectives) {
        told.collectives = op.seq - 1;  // collectives end in order
      }
      const bool waits = mayBeAwaited(group, ops, entry);
      if (told.ops.size() >= (waits ? kMostOps : kOldest)) {
        continue;
      }
      if (op.recording && op.recording->stack()) {
        stacks.push_back(op.recording->stack());
        lines.push_back({place, activity.groups.size(), told.ops.size()});
      }
      told.ops.push_back(recordOf(group, ops, entry, told.key, /*here=*/false, now));
    }
    told.lastCompleted = completedOf(group, lastCompleted);
  });
  if (known) {
    activity.counts.push_back(countsOf(group, told.key));
  }
  activity.groups.push_back(std::move(told));
}

status::Description describeProcess() {
  const auto now = Clock::now();
  status::Description description;
  auto& told = description.status;
  told.pid = host::processId();
  told.host = host::hostName();
  told.version = TORCHCOMMS_PG_VERSION;
  {
    LockGuard lock(run.mutex);
    told.run = run.id;
  }
  const auto compiling = Compiling::state(now);
  told.compilingMs = compiling.since ? compiling.since->count() : -1;
  told.compiledMs = compiling.ended ? compiling.ended->count() : -1;

  auto alive = shown();
  auto all = alive;
  std::erase_if(all, [](const auto& group) { return group->closed(); });
  std::ranges::stable_sort(all, std::greater<>(), [](const auto& group) { return group->size(); });
  // Ranks may be threads of one process. Otherwise the process has one global rank, which its
  // largest group gives: other communicators may number their ranks in another way.
  std::map<uint64_t, int> parts;
  for (const auto& group : all) {
    ++parts[group->place.load()->id];
  }
  const bool threads = std::ranges::any_of(parts, [](const auto& part) { return part.second > 1; });
  std::map<int64_t, std::vector<const GroupActivity*>> ranks;
  for (const auto& group : all) {
    ranks[(threads ? group : all.front())->globalRank()].push_back(group.get());
  }
  told.store = all.empty() ? "" : all.front()->place.load()->store;
  told.otherWaits = other_waits::ofStatus();
  auto lines = std::make_shared<std::vector<Line>>();
  for (const auto& [number, groups] : ranks) {
    auto& activity = told.ranks.emplace_back();
    activity.rank = number;
    activity.mainThread = threads ? 0 : PythonStackDump::mainThread();
    std::map<uint64_t, int> keys;  // groups of one key cannot be told apart
    for (const auto* const group : groups) {
      ++keys[group->key()];
    }
    for (const auto* const group : groups) {
      const bool known = keys[group->key()] == 1;
      describeMember(
          *group, known, now, activity, told.ranks.size() - 1, description.stacks, *lines);
    }
  }
  for (const auto& wait : told.otherWaits) {
    if (wait.self >= 0 && told.ranks.empty()) {
      auto& activity = told.ranks.emplace_back();
      activity.rank = wait.self;
      activity.mainThread = PythonStackDump::mainThread();
    }
  }
  description.setLines = [lines](
                             status::ProcessStatus& status, const std::vector<std::string>& told) {
    for (size_t i = 0; i < std::min(told.size(), lines->size()); ++i) {
      const auto& line = (*lines)[i];
      status.ranks[line.rank].groups[line.group].ops[line.op].calledAt = told[i];
    }
  };
  all.clear();
  letGo(std::move(alive));
  return description;
}

status::JobAnswers askJob(const status::OfJob& question) {
  const auto begun = Clock::now();
  const auto until = begun + Milliseconds(question.waitMs);
  const auto stores = JobStore::allHosts();
  for (const auto& store : stores) {
    store->ask(until);
  }
  const status::Folder folder(status::StatusServer::folder());
  status::JobAnswers all{
      {status::gather(folder, Milliseconds(question.waitMs))},
      {},
      {host::processId(), status::ownPlace(), question.lateMs, 0}};
  status::Roll roll(all.question);
  roll.add(all.hosts.front());
  for (const auto& store : stores) {
    if (roll.complete()) {
      break;
    }
    auto told = store->take(until, [&](const auto& host) {
      roll.add(host);
      return roll.complete();
    });
    std::ranges::move(told.hosts, std::back_inserter(all.hosts));
    std::ranges::move(told.unreached, std::back_inserter(all.unreached));
  }
  all.question.tookMs = std::chrono::duration_cast<Milliseconds>(Clock::now() - begun).count();
  return all;
}

void lookForNews(uint64_t store) {
  for (const auto& hosts : JobStore::allHosts()) {
    hosts->news().look(store);
  }
}

std::string describeJob(const status::OfJob& question) {
  return encode(askJob(question));
}

}  // namespace

std::shared_ptr<const StatusPart> StatusPart::begin(
    GroupActivity& group, const c10::intrusive_ptr<c10d::Store>& store, bool severalHosts) {
  auto part = std::make_shared<StatusPart>();
  part->server_ = status::StatusServer::of({describeProcess, describeJob, lookForNews});
  if (!part->server_) {
    return nullptr;
  }
  const StorePlace place(store);
  const auto address = JobStore::of(place.store)->address();
  const auto text = address + '\0' + place.prefixes + '\0' + std::to_string(group.key());
  const auto id = host::hashBytes(text.data(), text.size());
  if (severalHosts) {
    try {
      part->hosts_ = JobStore::of(store)->hosts();
    } catch (const std::exception& error) {
      printLine(
          std::string("torchcomms_pg: other hosts get no status of this one: ") + error.what());
    }
  }
  group.place.store(std::make_shared<const GroupActivity::Place>(id, address));
  part->server_->add({id, group.globalRank()});
  return part;
}

HeldUp heldUpBy(const GroupActivity& group, const Operation& op, Milliseconds patience) try {
  const auto place = group.place.load();
  if (!place) {
    return {};  // the status is turned off
  }
  const auto told = askJob({0, patience.count()});
  const status::Job job(told);
  for (const auto* const known : job.groups()) {
    const auto member = known->members.find(group.rank());
    if (known->id != place->id || member == known->members.end()) {
      continue;
    }
    for (const auto& asked : member->second.told->ops) {
      if (asked.text != describe(op) || asked.seq != (op.collective ? op.seq : 0)) {
        continue;
      }
      if (asked.ageMs < told.question.tookMs) {
        return {"", {}, asked.calledAt};
      }
      const auto finding = job.judge(*known, group.rank(), asked);
      return {
          job.heldUpBy(*known, finding), globalRanksOf(group, finding.verdict.ranks),
          asked.calledAt};
    }
  }
  return {};
} catch (const std::exception&) {
  return {};  // the status's folder cannot be read
}

std::shared_ptr<status::StatusServer> serveStatus(const status::Membership& membership) {
  auto server = status::StatusServer::of({describeProcess, describeJob, lookForNews});
  if (server) {
    server->add(membership);
  }
  return server;
}

std::optional<Explained> explain(const std::string& text, Milliseconds patience) {
  if (status::StatusServer::folder().empty() || shown().empty()) {
    return std::nullopt;
  }
  const auto told = askJob({0, patience.count()});
  const status::Job job(told);
  for (const auto& wait : job.otherWaits()) {
    if (wait.text == text) {
      const auto* const first = job.elsewhere(wait.there.front());
      const bool here = first == nullptr || (first->process->pid == told.question.pid &&
                                             first->process->host == host::hostName());
      return Explained{wait, here ? std::nullopt : std::optional(wait.there.front())};
    }
  }
  return std::nullopt;
}

void setRunId(const std::string& id) {
  LockGuard lock(run.mutex);
  run.id = id;
}

}  // namespace torchcomms_pg
