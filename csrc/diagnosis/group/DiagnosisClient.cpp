#include "diagnosis/group/DiagnosisClient.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "base/Mutex.hpp"
#include "diagnosis/group/ErrorFile.hpp"
#include "diagnosis/group/ProcessTotals.hpp"
#include "diagnosis/store/LeftWords.hpp"
#include "diagnosis/store/StoreBoard.hpp"
#include "monitor/Apart.hpp"
#include "monitor/Compiling.hpp"

namespace torchcomms_pg {

namespace {

// Interval at which a rank polls for the others' dumps.
constexpr Milliseconds kDumpLook{20};

std::atomic<Milliseconds> verdictAfter{Milliseconds(0)};

// Returns what a communicator's failure has of a verdict.
Explanation explanation(Verdict verdict) {
  return {
      std::move(verdict.ranks), std::move(verdict.summary), std::move(verdict.text),
      std::move(verdict.parting), Milliseconds(verdict.extensionMs)};
}
std::optional<Explanation> explanation(std::optional<Verdict> verdict) {
  return verdict ? std::optional(explanation(*std::move(verdict))) : std::nullopt;
}

}  // namespace

DiagnosisClient::DiagnosisClient(const Observed& comm) : comm_(comm) {
  process_totals::add(comm_.inFlight.sharedTotals(), globalRank());
}

void DiagnosisClient::open(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
    const std::vector<Peer>& peers) {
  store_ = c10::make_intrusive<c10d::PrefixStore>(prefix + "diagnosis", store);
  peers_ = peers;
  // A c10d group may have a communicator for each type of device, and for pairs of ranks.
  key_ =
      keyOf(*this, c10::DeviceTypeName(comm_.self.device().type()) + joinRanks(comm_.self.pair()));
  HangDiagnosis::Options options;
  options.rank = rank();
  options.ranks = comm_.self.members();
  options.number = this->group().numberOf(rank());
  options.describeSilent = [peers = peers_](int peer) { return describeSilent(peers.at(peer)); };
  enlist(std::shared_ptr<GroupActivity>(comm_.self.keepAlive(), this));
  const auto self = Peer::self();
  const bool severalHosts =
      std::ranges::any_of(peers_, [&](const auto& peer) { return !peer.sameHost(self); });
  // The process's status server has to run when its looks for news begin.
  status_.store(StatusPart::begin(*this, store_, severalHosts));
  const auto& library = comm_.library.api();
  std::shared_ptr<status::Hosts> hosts;
  if (!library.has(Feature::ring) || library.has(Feature::probe)) {
    hosts = JobStore::of(store)->hosts();
    options.slack = [weak = std::weak_ptr(hosts)] {
      const auto known = weak.lock();
      return known ? known->news().slack() : Milliseconds(0);
    };
  }
  const auto diagnosisAt = [&](const auto& place, HangDiagnosis::Options how) {
    auto made = HangDiagnosis::open(std::make_unique<StoreBoard>(place), std::move(how));
    if (hosts) {
      hosts->news().listen(key_, made);
    }
    return made;
  };
  if (verdictAfter.load().count() > 0) {
    earlyAfter_ = verdictAfter;
    auto early = options;
    early.goesOn = true;
    early_.store(diagnosisAt(c10::make_intrusive<c10d::PrefixStore>("early", store_), early));
  }
  if (library.has(Feature::probe)) {
    const auto job = JobStore::of(store);
    options.look = library.probe(
        comm_.library.get(), {.announce = [board = std::make_shared<StoreBoard>(job),
                                           key = key_] { status::News::ring(*board, key); },
                              .call = [job](const auto& body) { job->call(body); },
                              .slack = options.slack});
  }
  options.dump = [this, weak = comm_.self.weak_from_this()] {
    if (const auto comm = weak.lock()) {
      dumpApart(*this);
    }
  };
  diagnosis_.store(diagnosisAt(store_, std::move(options)));
  hosts_.store(std::move(hosts));
  if (!queues() && comm_.self.pair().empty()) {
    lateness_.open(store, std::to_string(key_) + "/" + prefix, comm_.self.group(), rank(), size());
  }
}

void DiagnosisClient::close() {
  status_.store({});
  hosts_.store({});
  if (const auto early = early_.exchange({})) {
    if (comm_.failure.load()) {
      early->close();  // the failure has been reported
    } else {
      earlyVerdicts_.close(*early);
    }
  }
  if (const auto diagnosis = diagnosis_.load()) {
    diagnosis->close();
  }
  lateness_.close();
  process_totals::keepLateness(comm_.inFlight.totals(), lateness_.judged());
}

void DiagnosisClient::check(Clock::time_point now) {
  lateness_.check(now);
  answer(now);
  const auto early = early_.load();
  if (!early || closed() || comm_.failure.load()) {
    return;
  }
  if (earlyVerdicts_.look(*early)) {
    dumpApart(*this);
  }
  earlyVerdicts_.ask(*early, earlyVerdicts_.overdue(now, earlyAfter_), now, earlyAfter_);
}

void DiagnosisClient::answer(Clock::time_point now) {
  const auto diagnosis = diagnosis_.load();
  if (!diagnosis) {
    return;
  }
  const auto early = early_.load();
  const bool ring = diagnosis->takeRing();
  const bool ringEarly = early && early->takeRing();
  const auto rings = ring || ringEarly ? this->ring() : comm_.library.ring(0);
  const bool news = rings > heardRings_;
  heardRings_ = std::max(rings, heardRings_);
  for (const auto& each : {diagnosis, early}) {
    if (each && news) {
      each->notice();
    }
    if (each && each->wantsStatus()) {
      auto snapshot = snapshotOf(*this, now);
      if (const auto known = comm_.failure.load()) {
        snapshot.answer.failure = known->message;
      }
      each->answer(std::move(snapshot));
    }
  }
}

uint64_t DiagnosisClient::ring() const {
  if (const auto hosts = hosts_.load()) {
    hosts->news().ring(key_);
  }
  return comm_.library.ring(1);
}

std::string DiagnosisClient::failureMessage() const {
  const auto failure = comm_.failure.load();
  return failure && !closed() ? failure->text() : "";
}

void DiagnosisClient::leave(const std::string& how) noexcept {
  if (store_ && !comm_.failure.load()) {
    left_words::leave(store_, rank(), size(), how, comm_.inFlight);
  }
}

std::string DiagnosisClient::leftWords(const std::vector<int>& ranks) {
  return store_ && !ranks.empty() ? left_words::tell(store_, ranks, group()) : "";
}

void DiagnosisClient::setVerdictAfter(Milliseconds time) {
  verdictAfter = time;
}

void DiagnosisClient::awaitDumps(Milliseconds patience) {
  if (!store_) {
    return;
  }
  const auto until = Clock::now() + patience;
  // The store may have ended with the rank that served it.
  apart([store = store_, peers = peers_, rank = rank(), ranks = comm_.self.members(), until] {
    StoreBoard board(store);
    const auto key = [](int of) { return "dumped/" + std::to_string(of); };
    board.set(key(rank), "");
    for (const int peer : ranks) {
      while (Clock::now() < until && !board.get(key(peer)) && !peers.at(peer).dead()) {
        std::this_thread::sleep_for(kDumpLook);
      }
    }
  }).wait_until(until);
}

std::optional<Explanation> DiagnosisClient::ask(const Operation& op, Clock::time_point now) {
  const auto diagnosis = diagnosis_.load();
  if (!diagnosis) {
    return Explanation{};
  }
  auto asked = request(op, now, op.timeout, op.issued + op.timeout);
  asked.ended = !comm_.inFlight.has(op);
  return explanation(diagnosis->ask(asked, now));
}

std::optional<Explanation> DiagnosisClient::final() {
  const auto diagnosis = diagnosis_.load();
  return explanation(diagnosis ? diagnosis->final() : std::nullopt);
}

Explanation DiagnosisClient::await(
    const Operation& op, Milliseconds timeout, Clock::time_point deadline) {
  const auto diagnosis = diagnosis_.load();
  if (!diagnosis) {
    return {};
  }
  return explanation(diagnosis->await(
      request(op, Clock::now(), timeout, deadline), [&] { return !comm_.inFlight.has(op); }));
}

std::optional<Explanation> DiagnosisClient::awaitOthers() {
  const auto diagnosis = diagnosis_.load();
  return explanation(diagnosis ? diagnosis->awaitOthers() : std::nullopt);
}

void DiagnosisClient::failed(const Failure& failure) {
  error_file::write(
      "torchcomms_pg.CommError: " + failure.text(), globalRanksOf(*this, failure.ranks));
  process_totals::noteFailure();
}

void DiagnosisClient::askForDumps() {
  std::shared_ptr<GroupActivity> keeps;
  const DiagnosisClient* largest = nullptr;
  for (auto& group : enlisted()) {
    const auto* const client = dynamic_cast<const DiagnosisClient*>(group.get());
    if (client == nullptr) {
      continue;
    }
    const auto& comm = client->comm_;
    const auto& known = largest == nullptr ? comm_ : largest->comm_;
    if (comm.self.members().size() > known.self.members().size() && !comm.failure.load() &&
        !comm.library.closed()) {
      keeps = std::move(group);
      largest = client;
    }
  }
  if (largest == nullptr) {
    return;
  }
  if (const auto diagnosis = largest->diagnosis_.load()) {
    diagnosis->askForDumps();
    largest->ring();
  }
}

std::optional<Explanation> DiagnosisClient::onFailure(
    const Operation& op, ncclResult_t result, const std::string& why) {
  const auto diagnosis = diagnosis_.load();
  if (!diagnosis) {
    return std::nullopt;
  }
  if (result != ncclInvalidUsage) {
    return explanation(diagnosis->awaitOthers());  // a rank that gave up has asked before
  }
  auto disagreement = request(op, Clock::now(), op.timeout, op.issued + op.timeout);
  disagreement.disagreement = why;
  return explanation(diagnosis->await(disagreement, nullptr));
}

DiagnosisRequest DiagnosisClient::request(
    const Operation& op, Clock::time_point now, Milliseconds timeout,
    Clock::time_point deadline) const {
  auto request = GroupActivity::request(op, now, timeout, deadline);
  const bool collectives = comm_.inFlight.inspect([](const auto& ops, const Operation&) {
    return std::ranges::all_of(ops, [](const auto& entry) { return entry.op->collective; });
  });
  const auto& library = comm_.library;
  const bool certain = library.absenceIsCertain();
  if (certain || library.failed()) {
    request.absent = library.missingRanks();
    // The ranks that the library misses are missing at its oldest operation.
    request.absentIsAll =
        certain && !library.failed() && collectives && request.seq > 0 && !request.absent.empty();
  }
  return request;
}

}  // namespace torchcomms_pg
