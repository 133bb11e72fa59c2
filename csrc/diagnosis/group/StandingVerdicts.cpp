#include "diagnosis/group/StandingVerdicts.hpp"

#include <utility>

#include "diagnosis/group/ErrorFile.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

bool StandingVerdicts::look(HangDiagnosis& diagnosis) {
  const auto standing = diagnosis.standing();
  LockGuard lock(mutex_);
  if (subject_ && !group_.inFlight().has(*subject_)) {
    diagnosis.end(endOf(*subject_));
    subject_.reset();
    ended_ = standing && standing->led;  // otherwise another rank ends it
  }
  settled_ = standing ? standing->since : subject_ ? settled_ : Clock::time_point{};
  if (!standing) {
    followed_.reset();
    ended_ = false;
    takeBack();
    return false;
  }
  follow(standing->about);
  const bool fresh = std::exchange(seen_, standing->since) != standing->since;
  ended_ = ended_ && !fresh;
  if (fresh) {
    writeForLauncher(diagnosis.standingVerdict());
  }
  return fresh;
}

void StandingVerdicts::writeForLauncher(const Verdict& verdict) {
  if (!verdict.text.empty()) {
    written_ = "torchcomms_pg: " + verdict.text;
    completed_ = latestCompleted();
    error_file::write(written_, globalRanksOf(group_, verdict.ranks));
  }
}

void StandingVerdicts::takeBack() {
  if (!written_.empty() && latestCompleted() != completed_) {
    error_file::withdraw(std::exchange(written_, ""));
  }
}

Clock::time_point StandingVerdicts::latestCompleted() const {
  return group_.inFlight().inspect(
      [](const auto&, const Operation& completed) { return completed.issued; });
}

void StandingVerdicts::follow(const Wait& about) {
  std::optional<Operation> found;
  group_.inFlight().inspect([&](const auto& ops, const Operation&) {
    for (const auto& entry : ops) {
      const auto& op = *entry.op;
      const bool collective = op.collective && !about.collectives.empty();
      if (collective && op.seq == about.collectives.back().seq) {
        found.emplace().noteFrom(op);
      }
    }
  });
  if (found) {
    followed_ = std::move(found);
  }
}

std::string StandingVerdicts::endOf(const Operation& op) const {
  const auto& group = group_.group();
  const auto took = std::chrono::duration_cast<Milliseconds>(Clock::now() - op.issued);
  return "the verdict on group '" + group.name + "' is over: " + describe(op) + " has ended, " +
         inSeconds(took) + " after its issue on rank " + group.numberOf(group_.rank());
}

std::optional<StandingVerdicts::Overdue> StandingVerdicts::overdue(
    Clock::time_point now, Milliseconds timeout) const {
  return group_.inFlight().inspect([&](const auto& ops, const Operation&) {
    monitorThread.check();
    std::optional<Overdue> found;
    if (asked_) {
      return found;
    }
    for (const auto& entry : ops) {
      const auto& op = *entry.op;
      const auto since = group_.begun(ops, entry);
      // A message may be issued long before a thread waits for it.
      const auto from = op.collective ? op.issued : since.value_or(op.issued);
      if (since && from >= settled_ && deadlines_.passed(from, *since, timeout, now)) {
        found.emplace().op.noteFrom(op);
        found->begun = *since;
        break;
      }
    }
    return found;
  });
}

void StandingVerdicts::ask(
    HangDiagnosis& diagnosis, const std::optional<Overdue>& overdue, Clock::time_point now,
    Milliseconds timeout) {
  if (overdue && group_.inFlight().has(overdue->op)) {
    asked_ = overdue;
  }
  if (!asked_) {
    return;
  }
  auto asked = group_.request(asked_->op, now, timeout, asked_->begun + timeout);
  asked.ended = !group_.inFlight().has(asked_->op);
  if (const auto verdict = diagnosis.ask(asked, now)) {
    take(*verdict, std::exchange(asked_, std::nullopt)->op, asked.wait, now, timeout);
  }
}

void StandingVerdicts::take(
    const Verdict& verdict, const Operation& op, const Wait& asked, Clock::time_point now,
    Milliseconds timeout) {
  if (verdict.extensionMs == 0) {
    // The verdict may be about another operation, whose end is then another rank's to report.
    if (isSameOperation(verdict.about, asked)) {
      LockGuard lock(mutex_);
      subject_ = op;
    }
    settled_ = now;
    return;
  }
  const bool first = deadlines_.extend(Milliseconds(verdict.extensionMs), now);
  if (first && group_.inFlight().has(op) && !isPointToPoint(op.kind)) {
    const auto& group = group_.group();
    printLine(
        "torchcomms_pg: " + describe(op) + " of group '" + group.name + "' on rank " +
        group.numberOf(group_.rank()) + " waits on after " + inSeconds(timeout) + ": " +
        verdict.text);
  }
}

void StandingVerdicts::close(HangDiagnosis& diagnosis) {
  const auto standing = diagnosis.standing();
  const auto& group = group_.group();
  std::string text;
  bool tells = false;
  UniqueLock lock(mutex_);
  if (standing && ended_) {
    tells = true;
  } else if (standing) {
    follow(standing->about);
    const auto& op = subject_ ? subject_ : followed_;
    const bool ended = op && !group_.inFlight().has(*op);
    const auto done = group_.inFlight().inspect(
        [](const auto&, const Operation& completed) { return completed.seq; });
    const auto& awaited = standing->about.collectives;
    const std::string over = "the verdict on group '" + group.name + "' is over: ";
    text = ended ? endOf(*op)
           : !awaited.empty() && done >= awaited.back().seq
               ? over + standing->about.text + " has ended"
               : over + "the group has been destroyed";
    if (ended && standing->led) {
      diagnosis.end(std::exchange(text, ""));
      tells = true;
    }
  }
  takeBack();
  lock.unlock();
  if (tells) {
    diagnosis.awaitEnd();
  }
  diagnosis.close();
  if (!text.empty()) {
    printLine("[rank " + group.numberOf(group_.rank()) + "] torchcomms_pg: " + text);
  }
}

}  // namespace torchcomms_pg
