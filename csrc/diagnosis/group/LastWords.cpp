#include "diagnosis/group/LastWords.hpp"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/ExitGuard.hpp"
#include "base/Thread.hpp"
#include "diagnosis/group/ErrorFile.hpp"
#include "diagnosis/group/GroupActivity.hpp"
#include "diagnosis/group/OtherWaits.hpp"
#include "diagnosis/group/ProcessActivity.hpp"
#include "monitor/Printer.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

// Age of an operation from which on its end counts as overdue: operations of a healthy program end
// before.
constexpr Milliseconds kLeastAge{300};

// Limit of the questions to the other ranks, and time after the signal for which this rank answers
// theirs.
constexpr Milliseconds kAsking{450};
constexpr Milliseconds kAnswering{600};

constexpr Milliseconds kFlushing{100};
constexpr Milliseconds kBetweenReadings{10};

struct WaitingOp {
  std::shared_ptr<GroupActivity> group;
  Operation op;
  bool awaited = false;
};

// Returns the operation in flight since before `at` that this process has waited for longest.
std::optional<WaitingOp> longest(Clock::time_point at) {
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
  return found;
}

std::string failureOf(const GroupActivity& group) {
  const auto message = group.failureMessage();
  return message.substr(0, message.find('\n'));
}

void dumpApart(int rank) {
  try {
    if (auto unfinished = ExitGuard::begin()) {
      startDetached("tcpg_apart", [unfinished = std::move(unfinished), rank] {
        process_recorder::dumpAfterFailure(rank, kAsking);
      });
    }
  } catch (const std::exception&) {
    // No thread can be started: the line is worth more than the dump.
  }
}

HeldUp heldUp(const WaitingOp& waiting) {
  try {
    return heldUpBy(*waiting.group, waiting.op, kAsking);
  } catch (const std::exception&) {
    return {};  // the status's folder cannot be read
  }
}

}  // namespace

void sayLastWords(const sigterm::Kept& signal) {
  auto waiting = longest(signal.at);
  while (waiting && Clock::now() - waiting->op.issued < kLeastAge) {
    std::this_thread::sleep_for(kBetweenReadings);
    waiting = longest(signal.at);
  }
  if (waiting) {
    const auto& group = *waiting->group;
    const auto& name = group.group().name;
    const auto number = group.group().numberOf(group.rank());
    const auto waited = std::chrono::duration_cast<Milliseconds>(signal.at - waiting->op.issued);
    dumpApart(static_cast<int>(group.globalRanks()[group.rank()]));
    const auto failure = failureOf(group);
    const auto what = describe(waiting->op) + " of group '" + name + "'";
    const auto by = failure.empty() ? heldUp(*waiting) : HeldUp{": " + failure, {}};
    const auto said = (signal.ends ? "ended by SIGTERM while " : "SIGTERM came while ") + what +
                      " had waited " + inSeconds(waited) + by.text;
    printLine("[rank " + number + "] torchcomms_pg: " + said);
    if (signal.ends && failure.empty()) {  // a failure has written its own text
      error_file::write("torchcomms_pg: " + said, by.ranks);
    }
  }
  const auto other = waiting ? "" : other_waits::lastWords(signal.at);
  if (!other.empty()) {
    const auto said = (signal.ends ? "ended by SIGTERM while " : "SIGTERM came while ") + other;
    printLine("torchcomms_pg: " + said);
    if (signal.ends) {
      error_file::write("torchcomms_pg: " + said, {});
    }
  }
  if (!enlisted().empty() || !other.empty()) {
    std::this_thread::sleep_until(signal.at + kAnswering);
    awaitPrinted(kFlushing);
  }
}

}  // namespace torchcomms_pg
