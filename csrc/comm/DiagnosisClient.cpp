#include "comm/DiagnosisClient.hpp"

#include <algorithm>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/OutstandingTask.hpp"
#include "base/PerProcess.hpp"
#include "comm/Flight.hpp"
#include "comm/Peer.hpp"
#include "comm/RecordedOp.hpp"
#include "comm/StoreBoard.hpp"
#include "host/Process.hpp"
#include "monitor/Compiling.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

// Number of rounds in which the monitor has to see nothing in flight.
constexpr int kIdleTicks = 2;

// Interval in which a rank that waits for the others' dumps looks.
constexpr Milliseconds kDumpLook{20};

// The communicators of this process that take part in diagnoses.
class Registry {
 public:
  static Registry& get() {
    static PerProcess<Registry> registry;
    return registry.get();
  }

  void add(std::weak_ptr<Communicator> comm) {
    std::lock_guard lock(mutex_);
    std::erase_if(comms_, [](const auto& known) { return known.expired(); });
    comms_.push_back(std::move(comm));
  }

  std::vector<std::shared_ptr<Communicator>> alive() {
    std::vector<std::shared_ptr<Communicator>> alive;
    std::lock_guard lock(mutex_);
    for (const auto& known : comms_) {
      if (auto comm = known.lock()) {
        alive.push_back(std::move(comm));
      }
    }
    return alive;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> comms_;
};

std::string describeSilent(const std::string& introduction) {
  const auto peer = Peer::parse(introduction);
  const auto pid = std::to_string(peer.pid);
  if (peer.pid == 0) {
    return "did not answer, and has not said where it runs";
  }
  if (!peer.sameHost(Peer::self())) {
    return "did not answer (pid " + pid + " on " + peer.host +
           "): it is dead or stopped, or the network is down";
  }
  const char state = host::processState(peer.pid);
  if (state == 'T' || state == 't') {
    return "its process is stopped (pid " + pid +
           "): by SIGSTOP, or by a debugger; SIGCONT has it go on";
  }
  if (!host::processAlive(peer.pid, 0)) {
    return "its process is dead (pid " + pid + ")";
  }
  return "did not answer, though its process is there (pid " + pid + ", state " +
         (state == '\0' ? std::string("unknown") : std::string(1, state)) +
         "): see py-spy dump --pid " + pid + ", or gdb";
}

}  // namespace

void DiagnosisClient::open(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix) {
  if (comm_.size() == 1 || store == nullptr) {
    return;
  }
  store_ = c10::make_intrusive<c10d::PrefixStore>(prefix + "diagnosis", store);
  // Introduces this rank, for the case that it cannot give its status.
  const auto self = Peer::self().text();
  store_->set(
      "who/" + std::to_string(comm_.rank()), std::vector<uint8_t>(self.begin(), self.end()));
  HangDiagnosis::Options options;
  options.rank = comm_.rank();
  options.size = comm_.size();
  options.describeSilent = describeSilent;
  if (comm_.api().probe != nullptr) {
    auto probe = comm_.api().probe(comm_.library().get());
    options.poll = std::move(probe.look);
    options.turn = probe.turn;
    options.turns = probe.turns;
  } else if (comm_.api().ring == nullptr) {
    options.poll = [](bool) { return false; };
  }
  const auto& global = comm_.group().globalRanks;
  const auto rank = static_cast<size_t>(comm_.rank());
  options.dump = [rank = rank < global.size() ? static_cast<int>(global[rank]) : comm_.rank()] {
    // The GIL may take its time, and the thread that asks for the dump has none.
    if (auto unfinished = OutstandingTask::begin()) {
      Monitor::get().runApart(
          [unfinished = std::move(unfinished), rank] { process_recorder::dumpAfterFailure(rank); });
    }
  };
  auto board = std::make_unique<StoreBoard>(store_);
  std::atomic_store(&diagnosis_, HangDiagnosis::open(std::move(board), std::move(options)));
  Registry::get().add(comm_.weak_from_this());
}

void DiagnosisClient::openLike(const DiagnosisClient& parent, const std::string& prefix) {
  open(parent.store_, prefix + "/");
}

void DiagnosisClient::openShrunk(DiagnosisClient& parent, const std::vector<int>& gone) {
  int number = 0;
  {
    std::lock_guard lock(parent.shrunkMutex_);
    number = ++parent.shrunk_[gone];
  }
  openLike(parent, "without/" + joinRanks(gone) + "/" + std::to_string(number));
}

void DiagnosisClient::close() {
  if (const auto diagnosis = this->diagnosis()) {
    diagnosis->close();
  }
}

void DiagnosisClient::check(Clock::time_point now) noexcept {
  try {
    std::optional<Operation> overdue;
    std::optional<Operation> first;
    const bool queued = comm_.executor().queues();
    const bool idle = comm_.inFlight().inspect([&](const auto& ops, const Operation&) {
      if (queued && !ops.empty()) {
        first.emplace().noteFrom(*ops.front().op);
      }
      for (const auto& entry : ops) {
        const bool ended = entry.flight && entry.flight->asked();  // it is being finished
        if (!ended && now - entry.op->issued >= entry.op->timeout) {
          overdue.emplace().noteFrom(*entry.op);
          break;
        }
      }
      return ops.empty();
    });
    if (!idle) {
      comm_.executor().wake();
    }
    answer(now);
    if (comm_.failureState().get()) {
      return;
    }
    auto& library = comm_.library();
    if (first && library.ready() && library.failed()) {
      explainFailure(*first);
      return;
    }
    checkDeadline(overdue, now);
    // A late rank learns of the failure here, once it is clear that it is late: an operation in
    // flight tells more, and sees it at the same time.
    idleTicks_ = idle ? idleTicks_ + 1 : 0;
    if (idleTicks_ > kIdleTicks && !comm_.closed()) {
      if (library.failed()) {
        learnOfFailure();
      } else {
        learnOfVerdict();
      }
    }
  } catch (...) {
    // Out of memory while describing a failure; the next tick tries again.
  }
}

void DiagnosisClient::answer(Clock::time_point now) {
  const auto diagnosis = this->diagnosis();
  if (!diagnosis) {
    return;
  }
  const auto rings = comm_.library().ring(diagnosis->takeRing() ? 1 : 0);
  if (rings > heardRings_) {
    heardRings_ = rings;
    diagnosis->notice();
  }
  if (diagnosis->wantsStatus()) {
    diagnosis->answer(snapshot(now));
  }
}

void DiagnosisClient::checkDeadline(
    const std::optional<Operation>& overdue, Clock::time_point now) {
  if (!overdue_ && (!overdue || (now < extendedUntil_ && overdue->issued <= extendedAt_))) {
    return;
  }
  const auto diagnosis = this->diagnosis();
  if (!diagnosis) {
    comm_.failureState().timeOut(*overdue, overdue->timeout, {});
    return;
  }
  // An operation whose diagnosis has begun is judged also if it ends meanwhile: other ranks may
  // have failed the group by then.
  if (!overdue_) {
    overdue_ = overdue;
  }
  const auto verdict = diagnosis->ask(request(*overdue_, now));
  if (!verdict) {
    return;  // a later round of the monitor finds it
  }
  const auto op = *std::exchange(overdue_, std::nullopt);
  if (verdict->extensionMs > 0) {
    extendedAt_ = now;
    extendedUntil_ = now + Milliseconds(verdict->extensionMs);
    tellExtension(op, op.timeout, verdict->text);
  } else {
    comm_.failureState().timeOut(op, op.timeout, *verdict);
  }
}

void DiagnosisClient::tellExtension(
    const Operation& op, Milliseconds timeout, const std::string& why) {
  if (extended_.exchange(op.seq) != op.seq) {
    printLine(
        "torchcomms_pg: " + describe(op) + " of group '" + comm_.group().name + "' on rank " +
        std::to_string(comm_.rank()) + " waits on after " + inSeconds(timeout) + ": " + why);
  }
}

void DiagnosisClient::explainFailure(const Operation& op) {
  apart([this, op] {
    comm_.failureState().asyncError(op);
    if (const auto failure = comm_.failureState().get()) {
      comm_.failureState().failLibrary(
          *failure);  // queued operations must not wait for a peer that is gone
    }
  });
}

void DiagnosisClient::learnOfFailure() {
  apart([this] {
    auto failure = comm_.failureState().elsewhere();
    const auto diagnosis = this->diagnosis();
    if (auto verdict = diagnosis ? diagnosis->awaitOthers() : std::nullopt) {
      failure.verdict = std::move(verdict->text);
      if (!verdict->ranks.empty()) {
        failure.ranks = std::move(verdict->ranks);
      }
    }
    comm_.failureState().set(std::move(failure), FailureState::Cause::elsewhere);
  });
}

void DiagnosisClient::learnOfVerdict() {
  const auto diagnosis = this->diagnosis();
  const auto verdict = diagnosis ? diagnosis->final() : std::nullopt;
  const bool tells = comm_.api().ring != nullptr && comm_.api().probe == nullptr;
  if (!verdict || tells) {  // such a library reports it in better words
    return;
  }
  apart([this, verdict = *verdict] {
    auto failure = comm_.failureState().elsewhere();
    failure.message += "an operation has timed out, or was not the same, on other ranks";
    failure.verdict = verdict.text;
    failure.ranks = verdict.ranks;
    // The library is left alone: the ranks that have asked fail it, with their own words.
    comm_.failureState().set(std::move(failure), FailureState::Cause::elsewhere);
  });
}

// Runs `body` in a thread of its own, one at a time.
void DiagnosisClient::apart(std::function<void()> body) {
  if (explaining_.exchange(true)) {
    return;
  }
  try {
    Monitor::get().runApart([unfinished = OutstandingTask(),
                             self = comm_.shared_from_this(),
                             this,
                             body = std::move(body)] {
      try {
        body();
      } catch (...) {
        // Out of memory while describing it; a later round of the monitor tries again.
      }
      explaining_ = false;
    });
  } catch (...) {
    explaining_ = false;
    throw;
  }
}

void DiagnosisClient::awaitDumps(Milliseconds patience) {
  if (!store_) {
    return;
  }
  // The store may block for as long as it likes, or be gone.
  const auto done = std::make_shared<std::promise<void>>();
  const auto until = Clock::now() + patience;
  Monitor::get().runApart([store = store_, rank = comm_.rank(), size = comm_.size(), until, done] {
    try {
      StoreBoard board(store);
      const auto key = [](int of) { return "dumped/" + std::to_string(of); };
      board.set(key(rank), "");
      for (int peer = 0; peer < size; ++peer) {
        const auto who = Peer::parse(board.get("who/" + std::to_string(peer)).value_or(""));
        while (Clock::now() < until && !board.get(key(peer)) && !who.dead()) {
          std::this_thread::sleep_for(kDumpLook);
        }
      }
    } catch (const std::exception&) {
      // The store went with the rank that served it.
    }
    done->set_value();
  });
  done->get_future().wait_until(until);
}

std::optional<Milliseconds> DiagnosisClient::judge(
    const Operation& op, Milliseconds timeout, Clock::time_point deadline) {
  Verdict verdict;
  if (const auto diagnosis = this->diagnosis()) {
    verdict = diagnosis->await(request(op, Clock::now(), timeout, deadline));
  }
  if (verdict.extensionMs > 0) {
    tellExtension(op, timeout, verdict.text);
    return Milliseconds(verdict.extensionMs);
  }
  comm_.failureState().timeOut(op, timeout, verdict);
  return std::nullopt;
}

void DiagnosisClient::askForDumps() {
  std::shared_ptr<Communicator> largest;
  for (const auto& comm : Registry::get().alive()) {
    if (comm->size() > (largest ? largest : comm_.shared_from_this())->size() &&
        !comm->failureState().get() && !comm->closed()) {
      largest = comm;
    }
  }
  if (!largest) {
    return;
  }
  auto& client = largest->diagnosis();
  if (const auto diagnosis = client.diagnosis()) {
    diagnosis->askForDumps();
    largest->library().ring(1);
  }
}

std::optional<Verdict> DiagnosisClient::onFailure(
    const Operation& op, ncclResult_t result, const std::string& why) {
  const auto diagnosis = this->diagnosis();
  if (!diagnosis) {
    return std::nullopt;
  }
  if (result != ncclInvalidUsage) {
    return diagnosis->awaitOthers();  // a rank that gave up has asked before
  }
  auto disagreement = request(op, Clock::now());
  disagreement.disagreement = why;
  return diagnosis->await(disagreement);
}

Clock::time_point DiagnosisClient::relax(Milliseconds time) {
  std::lock_guard lock(relaxationsMutex_);
  const auto end = *relaxations_.insert(Clock::now() + time);
  relaxedUntil_.store(relaxations_.rbegin()->time_since_epoch().count(), std::memory_order_relaxed);
  return end;
}

void DiagnosisClient::endRelaxation(Clock::time_point end) {
  std::lock_guard lock(relaxationsMutex_);
  relaxations_.extract(end);  // one of those that end then
  relaxedUntil_.store(
      relaxations_.empty() ? 0 : relaxations_.rbegin()->time_since_epoch().count(),
      std::memory_order_relaxed);
}

Milliseconds DiagnosisClient::relaxed() const {
  const auto until = relaxedUntil_.load(std::memory_order_relaxed);
  if (until == 0) {
    return Milliseconds(0);
  }
  const auto left = Clock::time_point(Clock::duration(until)) - Clock::now();
  return std::max(std::chrono::duration_cast<Milliseconds>(left), Milliseconds(0));
}

DiagnosisRequest DiagnosisClient::request(const Operation& op, Clock::time_point now) {
  return request(op, now, op.timeout, op.issued + op.timeout);
}

DiagnosisRequest DiagnosisClient::request(
    const Operation& op, Clock::time_point now, Milliseconds timeout, Clock::time_point deadline) {
  DiagnosisRequest request;
  const auto late = std::chrono::duration_cast<Milliseconds>(now - deadline);
  request.compileLeftMs = (Compiling::limit() - late).count();
  request.group = comm_.group().name;
  request.globalRanks = comm_.group().globalRanks;
  request.size = comm_.size();
  request.op = describe(op);
  // A batch may consist of messages, which are counted apart.
  request.pointToPoint = isPointToPoint(op.kind) || op.kind == OpKind::coalesced;
  request.peer = waitsForPeer(op.kind) ? op.peer : -1;
  request.seq = op.seq;
  request.timeoutMs = timeout.count();
  request.waitedMs = std::chrono::duration_cast<Milliseconds>(now - op.issued).count();
  const auto& library = comm_.library();
  if (library.absenceIsCertain() || library.failed()) {
    request.absent = library.absentRanks();
  }
  request.queued = comm_.executor().queues();
  return request;
}

void DiagnosisClient::tellElsewhere(RankStatus& answer) {
  for (const auto& other : Registry::get().alive()) {
    if (other.get() == &comm_ || other->executor().queues()) {
      continue;  // the ranks that a device's queue waits for are unknown
    }
    const auto awaited = other->inFlight().inspect([&](const auto& ops, const Operation&) {
      for (const auto& entry : ops) {
        if (entry.work == nullptr || entry.work->awaited()) {
          return describe(*entry.op) + " of group '" + other->group().name + "'";
        }
      }
      return std::string();
    });
    if (awaited.empty()) {
      continue;
    }
    for (const int rank : other->library().absentRanks()) {
      const auto& global = other->group().globalRanks;
      const auto known = static_cast<size_t>(rank) < global.size();
      answer.elsewhereFor.push_back(known ? global[rank] : rank);
    }
    answer.elsewhere = awaited;
    break;
  }
}

HangDiagnosis::Snapshot DiagnosisClient::snapshot(Clock::time_point now) {
  HangDiagnosis::Snapshot snapshot;
  auto& answer = snapshot.answer;
  answer.rank = comm_.rank();
  answer.issued = comm_.sequenceNumber();
  answer.relaxedMs = relaxed().count();
  const auto compiling = Compiling::state(now);
  answer.compilingMs = compiling.since ? compiling.since->count() : -1;
  answer.compiledMs = compiling.ended ? compiling.ended->count() : -1;
  if (const auto known = comm_.failureState().get()) {
    answer.failure = known->message;
  }
  tellElsewhere(answer);
  comm_.inFlight().inspect([&](const auto& ops, const Operation& lastCompleted) {
    if (!ops.empty()) {
      const auto& oldest = *ops.front().op;
      answer.current = describe(oldest);
      answer.currentSeq = oldest.seq;
      answer.waitedMs = std::chrono::duration_cast<Milliseconds>(now - oldest.issued).count();
      if (oldest.recording) {
        snapshot.stack = oldest.recording->stack();
      }
    }
    if (lastCompleted.seq != 0) {
      answer.completed = describe(lastCompleted);
    }
  });
  return snapshot;
}

}  // namespace torchcomms_pg
