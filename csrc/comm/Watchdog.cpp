#include "comm/Watchdog.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Thread.hpp"
#include "comm/DeferredOps.hpp"
#include "comm/FailureState.hpp"
#include "comm/Flight.hpp"
#include "comm/Identity.hpp"
#include "comm/InFlightOps.hpp"
#include "handle/CommHandle.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

// Number of rounds in which the monitor must see nothing in flight.
constexpr int kIdleTicks = 2;

// Interval at which the monitor looks at processes. An operation must also be in flight for this
// time beside a dead process, since its end may not have been seen yet.
constexpr Milliseconds kDeathLook{200};
constexpr Milliseconds kDeathPatience{500};

// Time after which the monitor makes other threads finish deferred operations. A thread that is
// going to wait for one finishes it sooner.
constexpr Milliseconds kNobodyWaits{20};

}  // namespace

void Watchdog::open(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
    std::vector<Peer> peers) {
  if (self_.size() == 1 || store == nullptr) {
    return;
  }
  store_ = c10::make_intrusive<c10d::PrefixStore>(prefix + "diagnosis", store);
  peers_ = std::move(peers);
  observer_.open(store, prefix, peers_);
}

void Watchdog::openLike(
    const Watchdog& parent, const std::string& prefix, const std::vector<int>& ranks) {
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

void Watchdog::openShrunk(Watchdog& parent, const std::vector<int>& gone) {
  int number = 0;
  {
    LockGuard lock(parent.shrunkMutex_);
    number = ++parent.shrunk_[gone];
  }
  std::vector<int> left;
  for (int rank = 0; rank < parent.self_.size(); ++rank) {
    if (!std::binary_search(gone.begin(), gone.end(), rank)) {
      left.push_back(rank);
    }
  }
  openLike(parent, "without/" + joinRanks(gone) + "/" + std::to_string(number), left);
}

void Watchdog::check(Clock::time_point now) noexcept {
  try {
    std::optional<Operation> overdue;
    std::optional<Operation> first;
    bool left = false;
    const bool queued = self_.queues();
    const bool idle = inFlight_.inspect([&](const auto& ops, const Operation&) {
      monitorThread.check();
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
      deferred_.wake();
    }
    observer_.check(now);
    if (const auto failure = failureState_.get()) {
      failureState_.failLibraryIfDue(*failure);
      return;
    }
    if (first && noticeDeath(now)) {
      return;
    }
    if (first && library_.ready() && library_.failed()) {
      explainFailure(*first);
      return;
    }
    checkDeadline(overdue, now);
    // A late rank learns of the failure at this point, once it has certainly nothing in flight: an
    // operation in flight sees the failure at the same time, and reports more.
    idleTicks_ = idle ? idleTicks_ + 1 : 0;
    if (idleTicks_ > kIdleTicks && !library_.closed()) {
      if (library_.failed()) {
        learnOfFailure();
      } else {
        learnOfVerdict();
      }
    }
  } catch (...) {
    // Out of memory while describing a failure; the next tick tries again.
  }
}

void Watchdog::watchOver() {
  auto watched = std::make_shared<Watched>();
  const auto self = Peer::self();
  for (const int rank : self_.members()) {
    const bool known = static_cast<size_t>(rank) < peers_.size() && peers_[rank].pid != 0;
    if (known && rank != self_.rank() && peers_[rank].sameHost(self) &&
        peers_[rank].pid != self.pid) {
      watched->emplace_back(rank, peers_[rank]);
    }
  }
  watched_.store(std::shared_ptr<const Watched>(std::move(watched)));
}

bool Watchdog::noticeDeath(Clock::time_point now) {
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
  inFlight_.inspect([&](const auto& ops, const Operation&) {
    monitorThread.check();
    for (const auto& entry : ops) {
      if (entry.flight && entry.flight->asked()) {
        continue;  // it has ended
      }
      auto first = Clock::time_point::max();
      for (const auto& [rank, since] : dead_) {
        if (since <= first && now - std::max(since, entry.op->issued) >= kDeathPatience &&
            needsAlive(*entry.op, self_.rank(), rank)) {
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
    failureState_.lose(op, ranks, pids);
  });
  return true;
}

void Watchdog::checkDeadline(const std::optional<Operation>& overdue, Clock::time_point now) {
  if (!overdue_ && !overdue) {
    return;
  }
  // An operation that the observer has begun to explain is judged even if it ends meanwhile: other
  // ranks may have failed the group by then.
  if (!overdue_) {
    overdue_ = overdue;
  }
  const auto found = observer_.ask(*overdue_, now);
  if (!found) {
    return;  // a later round of the monitor finds it
  }
  const auto op = *std::exchange(overdue_, std::nullopt);
  if (found->extension.count() > 0) {
    deadlines_.extend(found->extension, now);
    printExtension(op, op.timeout, found->verdict);
  } else {
    failureState_.timeOut(op, op.timeout, *found);
  }
}

void Watchdog::printExtension(const Operation& op, Milliseconds timeout, const std::string& why) {
  if (extended_.exchange(op.seq) != op.seq) {
    printLine(
        "torchcomms_pg: " + describe(op) + " of group '" + self_.group().name + "' on rank " +
        self_.group().numberOf(self_.rank()) + " waits on after " + inSeconds(timeout) + ": " +
        why);
  }
}

void Watchdog::explainFailure(const Operation& op) {
  apart([this, op] {
    failureState_.failBoth([&] {
      failureState_.asyncError(op);
      if (const auto failure = failureState_.get()) {
        failureState_.failLibrary(*failure);  // queued operations must not wait for a dead peer
      }
    });
  });
}

void Watchdog::learnOfFailure() {
  apart([this] {
    auto failure = failureState_.elsewhere();
    failure.message += observer_.leftWords(failure.ranks);
    if (const auto found = observer_.awaitOthers()) {
      found->addTo(failure);
    }
    failureState_.set(std::move(failure), FailureState::Cause::elsewhere);
  });
}

void Watchdog::learnOfVerdict() {
  const auto found = observer_.final();
  const bool tells = library_.api().has(Feature::ring) && !library_.api().has(Feature::probe);
  if (!found || tells) {  // such a library reports it in more detail
    return;
  }
  apart([this, found = *found] {
    auto failure = failureState_.elsewhere();
    failure.message += "an operation has timed out, or was not the same, on other ranks";
    found.addTo(failure);
    // Does not fail the library: the ranks that have asked do so, with their own text.
    failureState_.set(std::move(failure), FailureState::Cause::elsewhere);
  });
}

// Runs `body` in a separate thread, one at a time.
void Watchdog::apart(std::function<void()> body) {
  if (explaining_.exchange(true)) {
    return;
  }
  try {
    Monitor::get().runDetached(
        [unfinished = ExitGuard(), self = self_.keepAlive(), this, body = std::move(body)] {
          attempt(body);  // if it fails for lack of memory, a later round tries again
          explaining_ = false;
        });
  } catch (...) {
    explaining_ = false;
    throw;
  }
}

std::optional<Milliseconds> Watchdog::judge(
    const Operation& op, Milliseconds timeout, Clock::time_point deadline) {
  const auto found = observer_.await(op, timeout, deadline);
  if (found.extension.count() > 0) {
    printExtension(op, timeout, found.verdict);
    return found.extension;
  }
  failureState_.timeOut(op, timeout, found);
  return std::nullopt;
}

}  // namespace torchcomms_pg
