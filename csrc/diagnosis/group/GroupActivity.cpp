#include "diagnosis/group/GroupActivity.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "diagnosis/group/LastWords.hpp"
#include "diagnosis/group/OtherWaits.hpp"
#include "diagnosis/rank/PythonStackDump.hpp"
#include "host/Process.hpp"
#include "monitor/Apart.hpp"
#include "monitor/Compiling.hpp"
#include "recorder/ProcessRecorder.hpp"
#include "recorder/RecordedOp.hpp"

namespace torchcomms_pg {

namespace {

struct Enlisted {
  Mutex mutex;
  std::vector<std::weak_ptr<GroupActivity>> groups GUARDED_BY(mutex);
};
PerProcess<Enlisted> enlistedGroups;

// Return what an operation of `group` waits for, and for an operation in flight also which thread
// waits. `ops`: the group's operations in flight. `key`: the group's key; 0 if it is not unique.
// `here`: `group` is the diagnosed group, which the text need not name.
Wait describeWait(
    const GroupActivity& group, const InFlightOps::List& ops, const Operation& op, uint64_t key,
    bool here) {
  Wait wait;
  wait.text = describe(op) + (here ? "" : " of group '" + group.group().name + "'");
  // A shrink does not need the ranks that it leaves out.
  wait.group = op.kind == OpKind::shrink ? 0 : key;
  const auto members = group.globalRanks();
  wait.members = runsOf(members);
  const auto ended = group.inFlight().totals().sums(OpKind::recv);
  const auto await = [&](OpKind kind, int peer, uint64_t number) {
    using Kind = AwaitedMessage::Kind;
    if (kind == OpKind::recv && peer < 0) {
      number = ended.operations - ended.failures + 1;
    }
    if (waitsForPeer(kind)) {
      wait.messages.push_back(
          {kind == OpKind::send   ? Kind::send
           : kind == OpKind::recv ? Kind::receive
                                  : Kind::signal,
           peer < 0 ? AwaitedMessage::kAnyRank : members[peer], number});
    }
  };
  await(op.kind, op.peer, op.number);
  if (op.messages) {
    for (const auto& message : *op.messages) {
      await(message.kind, message.peer, message.number);
    }
  }
  const auto need = [&](const Operation& collective) {
    const bool one =
        group.meetsRootAlone() && hasRoot(collective.kind) && collective.peer != group.rank();
    const AwaitedCollective needed{collective.seq, one ? members[collective.peer] : -1};
    auto& all = wait.collectives;
    if (onlyGives(collective.kind, collective.peer == group.rank()) && !all.empty()) {
      return;  // a rank that only sends waits at most for earlier collectives
    }
    if (!all.empty() && all.back().rank == needed.rank) {
      all.back() = needed;  // a rank that has arrived at this one has arrived at the previous one
    } else {
      all.push_back(needed);
    }
  };
  for (const auto& entry : ops) {
    if (op.collective && entry.op->collective && entry.op->seq < op.seq) {
      need(*entry.op);
    }
  }
  if (op.collective) {
    need(op);
  }
  return wait;
}

Wait describeWait(
    const GroupActivity& group, const InFlightOps::List& ops, const InFlight& entry, uint64_t key,
    bool here) {
  auto wait = describeWait(group, ops, *entry.op, key, here);
  wait.thread = group.waiterFor(entry).thread;
  wait.indirect = wait.thread == 0;
  return wait;
}

// Adds, for all groups, what threads of this process wait for and what the process has issued.
void tellGroups(const GroupActivity& asked, RankStatus& answer) {
  auto alive = enlisted();
  // If ranks are threads of one process, skips the other ranks' groups, which say nothing about
  // this rank.
  const bool threads = std::ranges::any_of(alive, [&](const auto& group) {
    return group->key() == asked.key() && group->rank() != asked.rank();
  });
  std::erase_if(alive, [&](const auto& group) {
    return threads && group->globalRank() != asked.globalRank();
  });
  std::map<uint64_t, int> groups;  // number by key; groups of one key cannot be told apart
  for (const auto& group : alive) {
    ++groups[group->key()];
  }
  for (const auto& group : alive) {
    const bool here = group.get() == &asked;
    const auto key = group->key();
    const bool known = here || (groups[key] == 1 && key != asked.key());
    // Reads what the group waits for before what it has issued. A rank that goes on in between then
    // seems to have arrived, and is not blamed.
    group->inFlight().inspect([&](const auto& ops, const Operation&) {
      for (const auto& entry : ops) {
        if (mayBeAwaited(*group, ops, entry)) {
          answer.waits.push_back(describeWait(*group, ops, entry, known ? key : 0, here));
        }
      }
    });
    if (known && !group->closed()) {
      answer.counts.push_back(countsOf(*group, key));
    }
  }
  answer.mainThread = threads ? 0 : PythonStackDump::mainThread();
  if (!threads) {  // otherwise it is not known which rank's thread waits
    std::ranges::move(other_waits::ofDiagnosis(), std::back_inserter(answer.waits));
  }
}

}  // namespace

GroupActivity::Waiter GroupActivity::waiterFor(const InFlight& entry) const {
  if (queues() || entry.left) {
    return {};
  }
  if (entry.work == nullptr || !entry.op->async) {
    return {entry.thread, entry.op->issued};
  }
  return {entry.work->waiter(), entry.op->issued};
}

DiagnosisRequest GroupActivity::request(
    const Operation& op, Clock::time_point now, Milliseconds timeout,
    Clock::time_point deadline) const {
  DiagnosisRequest request;
  const auto late = std::chrono::duration_cast<Milliseconds>(now - deadline);
  request.compileLeftMs = (Compiling::limit() - late).count();
  request.rank = rank();
  request.group = group().name;
  request.globalRanks = group().globalRanks;
  request.hosts = group().hosts;
  request.size = size();
  request.op = describe(op);
  request.signature = signature(op, !comparesSizes());
  request.seq = op.collective ? op.seq : 0;
  inFlight().inspect([&](const auto& ops, const Operation&) {
    request.wait = describeWait(*this, ops, op, key(), /*here=*/true);
  });
  request.timeoutMs = timeout.count();
  request.waitedMs = std::chrono::duration_cast<Milliseconds>(now - op.issued).count();
  request.queued = queues();
  request.mayHaveEnded = isPointToPoint(op.kind) && endsUnseen();
  return request;
}

bool mayBeAwaited(const GroupActivity& group, const InFlightOps::List& ops, const InFlight& entry) {
  if (group.queues() && &entry == &ops.front()) {
    return true;
  }
  if (group.waiterFor(entry).thread != 0) {
    return true;
  }
  const bool message = isPointToPoint(entry.op->kind) && !group.queues();
  return (entry.left && !message) || (entry.work != nullptr && entry.work->hasFuture());
}

std::string asRuns(const std::vector<int64_t>& ranks) {
  std::string text;
  for (size_t begin = 0, end = 0; begin < ranks.size(); begin = end) {
    for (end = begin + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) {
      ++end;
    }
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[begin]);
    if (end - begin > 1) {
      text += "-" + std::to_string(ranks[end - 1]);
    }
  }
  return text;
}

std::future<void> dumpApart(const GroupActivity& group, Milliseconds most) noexcept try {
  if (auto unfinished = ExitGuard::begin()) {
    return apart([unfinished, rank = static_cast<int>(group.globalRank()), most] {
      process_recorder::dumpAfterFailure(rank, most);
    });
  }
  return {};
} catch (const std::exception&) {
  return {};
}

std::vector<int64_t> globalRanksOf(const GroupActivity& group, const std::vector<int>& ranks) {
  const auto all = group.globalRanks();
  std::vector<int64_t> found;
  for (const int rank : ranks) {
    found.push_back(all.at(rank));
  }
  return found;
}

void enlist(const std::shared_ptr<GroupActivity>& group) {
  installLastWords();
  auto& all = enlistedGroups.get();
  LockGuard lock(all.mutex);
  std::erase_if(all.groups, [](const auto& known) { return known.expired(); });
  all.groups.push_back(group);
}

std::vector<std::shared_ptr<GroupActivity>> enlisted() {
  std::vector<std::shared_ptr<GroupActivity>> alive;
  auto& all = enlistedGroups.get();
  LockGuard lock(all.mutex);
  for (const auto& known : all.groups) {
    if (auto group = known.lock()) {
      alive.push_back(std::move(group));
    }
  }
  return alive;
}

uint64_t keyOf(const GroupActivity& group, const std::string& part) {
  const auto ranks = group.globalRanks();
  const auto text =
      group.group().name + '\0' + part +
      std::string(reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof ranks.front());
  return std::max<uint64_t>(host::hashBytes(text.data(), text.size()), 1);
}

status::OpInFlight recordOf(
    const GroupActivity& group, const InFlightOps::List& ops, const InFlight& entry, uint64_t key,
    bool here, Clock::time_point now) {
  const auto& op = *entry.op;
  status::OpInFlight record;
  record.text = describe(op);
  record.seq = op.collective ? op.seq : 0;
  record.signature = signature(op, !group.comparesSizes());
  record.ageMs = std::chrono::duration_cast<Milliseconds>(now - op.issued).count();
  record.timeoutMs = op.timeout.count();
  record.waits = mayBeAwaited(group, ops, entry);
  record.endsUnseen = isPointToPoint(op.kind) && group.endsUnseen();
  record.wait = describeWait(group, ops, entry, key, here);
  record.stand = record.wait.indirect ? Stand::issued : op.async ? Stand::awaited : Stand::inCall;
  return record;
}

CompletedOp completedOf(const GroupActivity& group, const Operation& op) {
  if (op.seq == 0) {
    return {};
  }
  return {describe(op), op.collective ? op.seq : 0, signature(op, !group.comparesSizes())};
}

GroupCounts countsOf(const GroupActivity& group, uint64_t key) {
  const auto& issued = group.issued();
  const auto ranks = group.globalRanks();
  GroupCounts counts;
  counts.group = key;
  counts.collectives = issued.collectives();
  counts.receivedFromAny = issued.receivedFromAny();
  counts.collectivesThread = issued.collectivesThread();
  counts.sendsThread = issued.sendsThread();
  counts.receivesThread = issued.receivesThread();
  for (int peer = 0; peer < group.size(); ++peer) {
    const PeerCounts with{
        ranks[peer], issued.sent(peer), issued.received(peer), issued.signalled(peer)};
    if (with.sent + with.received + with.signalled > 0) {
      counts.peers.push_back(with);
    }
  }
  return counts;
}

Silent describeSilent(const Peer& peer) {
  const auto pid = std::to_string(peer.pid);
  if (!peer.sameHost(Peer::self())) {
    return {
        "did not answer (pid " + pid + " on " + peer.host +
        "): it is dead or stopped, or the network is down"};
  }
  const char state = host::processState(peer.pid);
  if (state == 'T' || state == 't') {
    return {
        "its process is stopped (pid " + pid +
            "): by SIGSTOP, or by a debugger; SIGCONT has it go on",
        true};
  }
  if (!host::processAlive(peer.pid, 0)) {
    return {"its process is dead (pid " + pid + ")", true};
  }
  return {
      "did not answer, though its process is there (pid " + pid + ", state " +
      (state == '\0' ? std::string("unknown") : std::string(1, state)) +
      "): see py-spy dump --pid " + pid + ", or gdb"};
}

HangDiagnosis::Snapshot snapshotOf(const GroupActivity& group, Clock::time_point now) {
  HangDiagnosis::Snapshot snapshot;
  auto& answer = snapshot.answer;
  answer.rank = group.rank();
  answer.relaxedMs = group.relaxed().count();
  const auto compiling = Compiling::state(now);
  answer.compilingMs = compiling.since ? compiling.since->count() : -1;
  answer.compiledMs = compiling.ended ? compiling.ended->count() : -1;
  tellGroups(group, answer);
  group.inFlight().inspect([&](const auto& ops, const Operation& lastCompleted) {
    const auto shown = std::ranges::find_if(ops, [&](const auto& entry) {
      return entry.op->collective || mayBeAwaited(group, ops, entry);
    });
    if (shown != ops.end()) {
      setCurrent(answer, recordOf(group, ops, *shown, group.key(), /*here=*/true, now));
      if (shown->op->recording) {
        snapshot.stack = shown->op->recording->stack();
      }
    }
    answer.completed = completedOf(group, lastCompleted);
  });
  return snapshot;
}

}  // namespace torchcomms_pg
