#include "comm/DiagnosisClient.hpp"

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/ExitGuard.hpp"
#include "comm/Flight.hpp"
#include "comm/LeftWords.hpp"
#include "comm/Peer.hpp"
#include "comm/StoreBoard.hpp"
#include "monitor/Compiling.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

// Number of rounds in which the monitor must see nothing in flight.
constexpr int kIdleTicks = 2;

// Interval at which the monitor looks at processes; and the time for which an operation must be in
// flight beside a dead process, since its end may not have been seen yet.
constexpr Milliseconds kDeathLook{200};
constexpr Milliseconds kDeathPatience{500};

// Interval at which a rank polls for the others' dumps.
constexpr Milliseconds kDumpLook{20};

// Time after which the monitor has deferred operations finished. A thread that is going to wait for
// one finishes it sooner.
constexpr Milliseconds kNobodyWaits{20};

std::atomic<Milliseconds> verdictAfter{Milliseconds(0)};

// Returns the ranks that have connected.
std::vector<int> members(const Communicator& comm) {
  auto ranks = comm.pair();
  for (int rank = 0; comm.pair().empty() && rank < comm.size(); ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

void DiagnosisClient::open(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& prefix,
    std::vector<Peer> peers) {
  if (comm_.size() == 1 || store == nullptr) {
    return;
  }
  store_ = c10::make_intrusive<c10d::PrefixStore>(prefix + "diagnosis", store);
  peers_ = std::move(peers);
  // A c10d group may have a communicator for each type of device, and for pairs of ranks.
  key_ = keyOf(comm_, c10::DeviceTypeName(comm_.device().type()) + joinRanks(comm_.pair()));
  HangDiagnosis::Options options;
  options.rank = comm_.rank();
  options.ranks = members(comm_);
  options.number = comm_.group().numberOf(comm_.rank());
  options.describeSilent = [peers = peers_](int peer) { return describeSilent(peers.at(peer)); };
  if (comm_.api().has(Feature::probe)) {
    auto probe = comm_.api().probe(comm_.library().get());
    options.poll = std::move(probe.look);
    options.turn = probe.turn;
    options.turns = probe.turns;
  } else if (!comm_.api().has(Feature::ring)) {
    options.poll = [](bool) { return false; };
  }
  if (verdictAfter.load().count() > 0) {
    earlyAfter_ = verdictAfter;
    auto early = options;
    if (early.poll) {
      early.poll = [](bool) { return false; };  // only one caller may take the library's news
    }
    early.goesOn = true;
    early_.store(
        HangDiagnosis::open(
            std::make_unique<StoreBoard>(c10::make_intrusive<c10d::PrefixStore>("early", store_)),
            std::move(early)));
  }
  options.dump = [this, weak = std::weak_ptr(comm_.shared_from_this())] {
    if (const auto comm = weak.lock()) {
      dump();
    }
  };
  auto board = std::make_unique<StoreBoard>(store_);
  diagnosis_.store(HangDiagnosis::open(std::move(board), std::move(options)));
  if (!comm_.queues() && comm_.pair().empty()) {
    comm_.lateness().open(
        store, std::to_string(key_) + "/" + prefix, comm_.group(), comm_.rank(), comm_.size());
  }
  enlist(comm_.shared_from_this());
  const auto self = Peer::self();
  const bool severalHosts =
      std::ranges::any_of(peers_, [&](const auto& peer) { return !peer.sameHost(self); });
  status_.store(
      std::shared_ptr<StatusPart>(
          StatusPart::begin(comm_.shared_from_this(), store_, severalHosts)));
}

void DiagnosisClient::openLike(
    const DiagnosisClient& parent, const std::string& prefix, const std::vector<int>& ranks) {
  std::vector<Peer> peers;
  for (const int rank : ranks) {
    if (!parent.peers_.empty()) {
      peers.push_back(parent.peers_.at(rank));
    }
  }
  open(parent.store_, prefix + "/", std::move(peers));
  if (parent.watched_.load()) {
    watchOver();
  }
}

void DiagnosisClient::openShrunk(DiagnosisClient& parent, const std::vector<int>& gone) {
  int number = 0;
  {
    std::lock_guard lock(parent.shrunkMutex_);
    number = ++parent.shrunk_[gone];
  }
  std::vector<int> left;
  for (int rank = 0; rank < parent.comm_.size(); ++rank) {
    if (!std::binary_search(gone.begin(), gone.end(), rank)) {
      left.push_back(rank);
    }
  }
  openLike(parent, "without/" + joinRanks(gone) + "/" + std::to_string(number), left);
}

void DiagnosisClient::close() {
  status_.store({});
  if (const auto early = early_.exchange({})) {
    if (comm_.failureState().get()) {
      early->close();  // the failure has been reported
    } else {
      earlyVerdicts_.close(*early);
    }
  }
  if (const auto diagnosis = this->diagnosis()) {
    diagnosis->close();
  }
}

void DiagnosisClient::check(Clock::time_point now) noexcept {
  try {
    std::optional<Operation> overdue;
    std::optional<Operation> first;
    bool left = false;
    const bool queued = comm_.executor().queues();
    const bool idle = comm_.inFlight().inspect([&](const auto& ops, const Operation&) {
      if (queued && !ops.empty()) {
        first.emplace().noteFrom(*ops.front().op);
      }
      for (const auto& entry : ops) {
        const bool ended = entry.flight && entry.flight->asked();  // it is being finished
        const auto& op = *entry.op;
        if (!ended && deadlines_.passed(op.issued, op.issued, op.timeout, now)) {
          overdue.emplace().noteFrom(op);
          break;
        }
      }
      left = !ops.empty() && now - ops.front().op->issued >= kNobodyWaits;
      return ops.empty();
    });
    if (left) {
      comm_.executor().wake();
    }
    answer(now);
    if (comm_.failureState().get()) {
      return;
    }
    checkEarly(now);
    if (first && noticeDeath(now)) {
      return;
    }
    auto& library = comm_.library();
    if (first && library.ready() && library.failed()) {
      explainFailure(*first);
      return;
    }
    checkDeadline(overdue, now);
    // A late rank learns of the failure at this point, once it has certainly nothing in flight: an
    // operation in flight sees the failure at the same time, and reports more.
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

void DiagnosisClient::watchOver() {
  auto watched = std::make_shared<Watched>();
  const auto self = Peer::self();
  for (const int rank : members(comm_)) {
    const bool known = static_cast<size_t>(rank) < peers_.size() && peers_[rank].pid != 0;
    if (known && rank != comm_.rank() && peers_[rank].sameHost(self) &&
        peers_[rank].pid != self.pid) {
      watched->emplace_back(rank, peers_[rank]);
    }
  }
  watched_.store(std::shared_ptr<const Watched>(std::move(watched)));
}

bool DiagnosisClient::noticeDeath(Clock::time_point now) {
  const auto watched = watched_.load();
  if (!watched || now - lookedAt_ < kDeathLook) {
    return false;
  }
  lookedAt_ = now;
  for (const auto& [rank, peer] : *watched) {
    if (!dead_.contains(rank) && peer.dead()) {
      dead_[rank] = now;
    }
  }
  if (dead_.empty()) {
    return false;
  }
  // If several ranks have died since the last look, the later ones may have been ended by an error
  // that the first one's death caused: which died first is not known.
  Operation stuck;
  std::vector<int> ranks;
  comm_.inFlight().inspect([&](const auto& ops, const Operation&) {
    for (const auto& entry : ops) {
      if (entry.flight && entry.flight->asked()) {
        continue;  // it has ended
      }
      auto first = Clock::time_point::max();
      for (const auto& [rank, since] : dead_) {
        if (since <= first && now - std::max(since, entry.op->issued) >= kDeathPatience &&
            needsAlive(*entry.op, comm_.rank(), rank)) {
          if (since < first) {
            ranks.clear();
          }
          ranks.push_back(rank);
          first = since;
        }
      }
      if (!ranks.empty()) {
        stuck.noteFrom(*entry.op);
        return;
      }
    }
  });
  if (ranks.empty()) {
    return false;
  }
  std::vector<int> pids;
  for (const auto& [rank, peer] : *watched) {
    if (std::ranges::count(ranks, rank) > 0) {
      pids.push_back(static_cast<int>(peer.pid));
    }
  }
  apart([this, op = stuck, ranks = std::move(ranks), pids = std::move(pids)] {
    comm_.failureState().lose(op, ranks, pids);
  });
  return true;
}

void DiagnosisClient::answer(Clock::time_point now) {
  const auto diagnosis = this->diagnosis();
  if (!diagnosis) {
    return;
  }
  const auto early = early_.load();
  const bool ring = diagnosis->takeRing();
  const bool ringEarly = early && early->takeRing();
  const auto rings = comm_.library().ring(ring || ringEarly ? 1 : 0);
  const bool news = rings > heardRings_;
  heardRings_ = std::max(rings, heardRings_);
  for (const auto& each : {diagnosis, early}) {
    if (each && news) {
      each->notice();
    }
    if (each && each->wantsStatus()) {
      each->answer(snapshot(now));
    }
  }
}

void DiagnosisClient::leave(const std::string& how) const noexcept {
  if (store_ && !comm_.failureState().get()) {
    left_words::leave(store_, comm_.rank(), comm_.size(), how, comm_.inFlight());
  }
}

std::string DiagnosisClient::leftWords(const std::vector<int>& ranks) const noexcept {
  return store_ && !ranks.empty() ? left_words::tell(store_, ranks, comm_.group()) : "";
}

void DiagnosisClient::checkEarly(Clock::time_point now) {
  const auto early = early_.load();
  if (!early || comm_.closed()) {
    return;
  }
  if (earlyVerdicts_.look(*early)) {
    dump();
  }
  const auto late = earlyVerdicts_.overdue(now, earlyAfter_, [](const auto&, const auto& entry) {
    return std::optional(entry.op->issued);
  });
  earlyVerdicts_.ask(
      *early, late, now, earlyAfter_, [&](const Operation& op, Clock::time_point deadline) {
        return request(op, now, earlyAfter_, deadline);
      });
}

void DiagnosisClient::dump() const {
  // Runs in another thread: the wait for the GIL may be long, and the caller must not block.
  if (auto unfinished = ExitGuard::begin()) {
    const auto rank = static_cast<int>(comm_.globalRanks().at(comm_.rank()));
    Monitor::get().runDetached(
        [unfinished = std::move(unfinished), rank] { process_recorder::dumpAfterFailure(rank); });
  }
}

void DiagnosisClient::setVerdictAfter(Milliseconds time) {
  verdictAfter = time;
}

void DiagnosisClient::checkDeadline(
    const std::optional<Operation>& overdue, Clock::time_point now) {
  if (!overdue_ && !overdue) {
    return;
  }
  const auto diagnosis = this->diagnosis();
  if (!diagnosis) {
    comm_.failureState().timeOut(*overdue, overdue->timeout, {});
    return;
  }
  // An operation whose diagnosis has begun is judged even if it ends meanwhile: other ranks may
  // have failed the group by then.
  if (!overdue_) {
    overdue_ = overdue;
  }
  auto asked = request(*overdue_, now);
  asked.ended = !comm_.inFlight().has(*overdue_);
  const auto verdict = diagnosis->ask(asked, now);
  if (!verdict) {
    return;  // a later round of the monitor finds it
  }
  const auto op = *std::exchange(overdue_, std::nullopt);
  if (verdict->extensionMs > 0) {
    deadlines_.extend(Milliseconds(verdict->extensionMs), now);
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
        comm_.group().numberOf(comm_.rank()) + " waits on after " + inSeconds(timeout) + ": " +
        why);
  }
}

void DiagnosisClient::explainFailure(const Operation& op) {
  apart([this, op] {
    comm_.failureState().asyncError(op);
    if (const auto failure = comm_.failureState().get()) {
      comm_.failureState().failLibrary(
          *failure);  // queued operations must not wait for a dead peer
    }
  });
}

void DiagnosisClient::learnOfFailure() {
  apart([this] {
    auto failure = comm_.failureState().elsewhere();
    failure.message += leftWords(failure.ranks);
    const auto diagnosis = this->diagnosis();
    if (auto verdict = diagnosis ? diagnosis->awaitOthers() : std::nullopt) {
      failure.verdict = std::move(verdict->text);
      failure.parting = std::move(verdict->parting);
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
  const bool tells = comm_.api().has(Feature::ring) && !comm_.api().has(Feature::probe);
  if (!verdict || tells) {  // such a library reports it in more detail
    return;
  }
  apart([this, verdict = *verdict] {
    auto failure = comm_.failureState().elsewhere();
    failure.message += "an operation has timed out, or was not the same, on other ranks";
    failure.verdict = verdict.text;
    failure.parting = verdict.parting;
    failure.ranks = verdict.ranks;
    // Does not fail the library: the ranks that have asked do so, with their own text.
    comm_.failureState().set(std::move(failure), FailureState::Cause::elsewhere);
  });
}

// Runs `body` in a separate thread, one at a time.
void DiagnosisClient::apart(std::function<void()> body) {
  if (explaining_.exchange(true)) {
    return;
  }
  try {
    Monitor::get().runDetached(
        [unfinished = ExitGuard(), self = comm_.shared_from_this(), this, body = std::move(body)] {
          try {
            body();
          } catch (...) {
            // Out of memory while describing a failure; a later round of the monitor tries again.
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
  // The store may block for any time, or be gone.
  const auto done = std::make_shared<std::promise<void>>();
  const auto until = Clock::now() + patience;
  Monitor::get().runDetached(
      [store = store_, peers = peers_, rank = comm_.rank(), ranks = members(comm_), until, done] {
        try {
          StoreBoard board(store);
          const auto key = [](int of) { return "dumped/" + std::to_string(of); };
          board.set(key(rank), "");
          for (const int peer : ranks) {
            while (Clock::now() < until && !board.get(key(peer)) && !peers.at(peer).dead()) {
              std::this_thread::sleep_for(kDumpLook);
            }
          }
        } catch (const std::exception&) {
          // The store ended with the rank that served it.
        }
        done->set_value();
      });
  done->get_future().wait_until(until);
}

std::optional<Milliseconds> DiagnosisClient::judge(
    const Operation& op, Milliseconds timeout, Clock::time_point deadline) {
  Verdict verdict;
  if (const auto diagnosis = this->diagnosis()) {
    verdict = diagnosis->await(
        request(op, Clock::now(), timeout, deadline), [&] { return !comm_.inFlight().has(op); });
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
  for (const auto& group : enlisted()) {
    auto comm = std::dynamic_pointer_cast<Communicator>(group);
    if (comm && members(*comm).size() > members(largest ? *largest : comm_).size() &&
        !comm->failureState().get() && !comm->closed()) {
      largest = std::move(comm);
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
  return diagnosis->await(disagreement, nullptr);
}

Clock::time_point DiagnosisClient::relax(Milliseconds time) {
  std::lock_guard lock(relaxationsMutex_);
  const auto end = *relaxations_.insert(Clock::now() + time);
  relaxedUntil_.store(relaxations_.rbegin()->time_since_epoch().count(), std::memory_order_relaxed);
  return end;
}

void DiagnosisClient::endRelaxation(Clock::time_point end) {
  std::lock_guard lock(relaxationsMutex_);
  relaxations_.extract(end);  // one of the relaxations that end at this time
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
  auto request = requestAbout(comm_, op, now, timeout, deadline);
  const bool collectives = comm_.inFlight().inspect([](const auto& ops, const Operation&) {
    return std::ranges::all_of(ops, [](const auto& entry) { return entry.op->collective; });
  });
  const auto& library = comm_.library();
  const bool certain = library.absenceIsCertain();
  if (certain || library.failed()) {
    request.absent = library.missingRanks();
    // The ranks that the library misses are missing at its oldest operation.
    request.absentIsAll =
        certain && !library.failed() && collectives && request.seq > 0 && !request.absent.empty();
  }
  return request;
}

HangDiagnosis::Snapshot DiagnosisClient::snapshot(Clock::time_point now) {
  auto snapshot = snapshotOf(comm_, now);
  snapshot.answer.relaxedMs = relaxed().count();
  if (const auto known = comm_.failureState().get()) {
    snapshot.answer.failure = known->message;
  }
  return snapshot;
}

}  // namespace torchcomms_pg
