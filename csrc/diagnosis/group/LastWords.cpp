#include "diagnosis/group/LastWords.hpp"

#include <algorithm>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "diagnosis/group/ErrorFile.hpp"
#include "diagnosis/group/GroupActivity.hpp"
#include "diagnosis/group/OtherWaits.hpp"
#include "diagnosis/group/ProcessActivity.hpp"
#include "diagnosis/rank/Sigabrt.hpp"
#include "diagnosis/rank/Sigterm.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printable.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

// Age of an operation from which on its end counts as overdue: operations of a healthy program end
// before.
constexpr Milliseconds kLeastAge{300};

// Limit of the questions to the other ranks, and time after the signal for which this rank answers
// theirs.
constexpr Milliseconds kAsking{450};
constexpr Milliseconds kAnswering{600};

// The same two times when SIGABRT is about to end the process, which leaves word after that.
constexpr Milliseconds kLeastAgeOfAborted{100};
constexpr Milliseconds kAskingOfAborted{350};
constexpr size_t kMostReason = 400;  // length of an exception's text in a line

constexpr Milliseconds kFlushing{100};
constexpr Milliseconds kBetweenReadings{10};

struct WaitingOp {
  std::shared_ptr<GroupActivity> group;
  Operation op;
  bool awaited = false;
};

// Returns the operation in flight since before `at` that this process has waited for longest, once
// that operation is as old as `least`.
std::optional<WaitingOp> longest(Clock::time_point at, Milliseconds least) {
  for (;;) {
    std::optional<WaitingOp> found;
    for (const auto& group : enlisted()) {
      group->inFlight().inspect([&](const auto& ops, const Operation&) {
        for (const auto& entry : ops) {
          const bool awaited =
              group->waiterFor(entry).thread != 0 || (group->queues() && &entry == &ops.front());
          const auto rank = std::pair(!awaited, entry.op->issued);
          if (entry.op->issued < at && mayBeAwaited(*group, ops, entry) &&
              (!found || rank < std::pair(!found->awaited, found->op.issued))) {
            found.emplace().group = group;
            found->op.noteFrom(*entry.op);
            found->awaited = awaited;
          }
        }
      });
    }
    if (!found || Clock::now() - found->op.issued >= least) {
      return found;
    }
    std::this_thread::sleep_for(kBetweenReadings);
  }
}

// Returns the begin of a line about the group.
std::string rankOf(const GroupActivity& group) {
  return "[rank " + group.group().numberOf(group.rank()) + "] ";
}

std::string failureOf(const GroupActivity& group) {
  const auto message = group.failureMessage();
  return message.substr(0, message.find('\n'));
}

// Returns for how long the operation had waited at `at`. `place`: the line of its call, or "".
std::string waitedUntil(
    Clock::time_point at, const WaitingOp& waiting, const std::string& place = "") {
  const auto waited = std::chrono::duration_cast<Milliseconds>(at - waiting.op.issued);
  return describe(waiting.op) + " of group '" + waiting.group->group().name + "'" +
         (place.empty() ? "" : ", called at " + place + ",") + " had waited " + inSeconds(waited);
}

// Says whom this process waits for at SIGTERM.
void sayLastWords(const sigterm::Kept& signal) {
  std::string rank;
  std::string what;
  std::string failure;  // has written its own text
  HeldUp by;
  if (const auto waiting = longest(signal.at, kLeastAge)) {
    const auto& group = *waiting->group;
    dumpApart(group, kAsking);
    failure = failureOf(group);
    by = failure.empty() ? heldUpBy(group, waiting->op, kAsking) : HeldUp{": " + failure, {}, ""};
    rank = rankOf(group);
    what = waitedUntil(signal.at, *waiting) + by.text;
  } else {
    what = other_waits::lastWords(signal.at);
  }
  if (!what.empty()) {
    const auto said = std::string("torchcomms_pg: ") +
                      (signal.ends ? "ended by SIGTERM while " : "SIGTERM came while ") + what;
    printLine(rank + said);
    if (signal.ends && failure.empty()) {
      error_file::write(said, by.ranks);
    }
  }
  if (!enlisted().empty() || !what.empty()) {
    std::this_thread::sleep_until(signal.at + kAnswering);
    awaitPrinted(kFlushing);
  }
}

// Returns the last completed operation of the group, as the rest of a line, or "".
std::string lastOf(const GroupActivity& group) {
  return group.inFlight().inspect([&](const auto&, const Operation& op) {
    return op.seq == 0 ? std::string()
                       : ", after " + describe(op) + " of group '" + group.group().name + "'";
  });
}

// Says in which operation SIGABRT ends this process, and leaves word of it.
void sayHowAborted(const sigabrt::Kept& signal) {
  const auto unfinished = ExitGuard::begin();
  if (!unfinished) {
    return;  // the interpreter is ending: the program has ended before
  }
  const auto waiting = longest(signal.at, kLeastAgeOfAborted);
  auto groups = enlisted();
  std::erase_if(groups, [](const auto& group) { return group->closed(); });
  if (waiting) {
    std::ranges::partition(groups, [&](const auto& group) { return group == waiting->group; });
  }
  const auto other = groups.empty() ? other_waits::lastWords(signal.at) : "";
  if (groups.empty() && other.empty()) {
    return;
  }
  const auto reason = signal.reason.substr(0, std::min(signal.reason.find('\n'), kMostReason));
  auto how = "ended by SIGABRT" + (reason.empty() ? "" : " (" + printable(reason) + ")");
  std::string rank;
  HeldUp by;
  std::future<void> dumped;
  if (groups.empty()) {
    how += " while " + other;
  } else {
    const auto& group = *groups.front();
    rank = rankOf(group);
    dumped = dumpApart(group, kAsking);
    by.text = lastOf(group);
  }
  if (waiting) {
    const auto failure = failureOf(*waiting->group);
    by = heldUpBy(*waiting->group, waiting->op, kAskingOfAborted);
    by.text = failure.empty() ? by.text : ": " + failure;
    how += " while " + waitedUntil(signal.at, *waiting, by.calledAt);
  }
  const auto said = "torchcomms_pg: " + how + by.text;
  printLine(rank + said);
  error_file::write(said, by.ranks);
  for (const auto& group : groups) {
    if (!group->hasFailed()) {
      group->leave(how);
    }
  }
  if (dumped.valid()) {
    dumped.wait_until(signal.at + sigabrt::kLimit);
  }
  awaitPrinted(kFlushing);
}

Mutex installing;
bool allowed GUARDED_BY(installing) = true;

}  // namespace

void allowLastWords(bool on) {
  LockGuard lock(installing);
  allowed = on;
}

void installLastWords() {
  LockGuard lock(installing);
  if (allowed) {
    sigterm::install(sayLastWords);
    sigabrt::install(sayHowAborted);
  }
  Monitor::setRound([](Clock::time_point now) noexcept {
    sigterm::check(now);
    sigabrt::check();
  });
}

}  // namespace torchcomms_pg
