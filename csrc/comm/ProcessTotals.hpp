// What all groups of this process have done, and the news of failures for who writes it down.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/GroupTotals.hpp"
#include "monitor/Lateness.hpp"

// A forked child has groups, and so totals, of its own. Thread-safe.
namespace torchcomms_pg::process_totals {

// Number of ended groups whose sums are kept each for itself. Those that have ended before are
// summed up under the name kOthers.
inline constexpr size_t kEnded = 64;
inline constexpr char kOthers[] = "(others)";

// Totals of the groups of one name and backend: on several devices, or one after another.
struct Group {
  struct Operation {
    OpKind kind = OpKind::allReduce;
    GroupTotals::Sums sums;
  };

  std::string name;
  std::string backend;
  bool watched = false;
  bool live = false;  // at least one of them has not ended
  uint64_t inFlight = 0;
  Clock::duration oldest{0};           // age of the oldest operation in flight; 0: there is none
  uint64_t failures = 0;               // see GroupTotals::noteFailure
  std::vector<RankLateness> lateness;  // by rank; empty: nothing is known here
  std::vector<Operation> operations;   // kinds of which an operation has ended, or been waited for
};

struct Totals {
  int64_t rank = -1;  // global one of this process in its first group; -1: there has been none
  std::vector<Group> groups;
};

// Makes the totals of a group that begins; it ends when nobody else holds them. `rank`: the global
// one of this process.
std::shared_ptr<GroupTotals> add(
    const std::string& group, const std::string& backend, bool watched, int64_t rank);

// Asks for the ends of operations on devices before, and waits half a second at most for that.
Totals read();

// Tells the writer that a group has failed, or that there is a verdict.
void noteFailure(GroupTotals& group);

// Functions of the one thread that writes the totals down.
//
// Waits for the next failure after the first `written`, all of which are written down, but no
// longer than `patience`. Returns the number of failures; none: endWriter() was called.
std::optional<uint64_t> awaitFailure(uint64_t written, Milliseconds patience);
// Ends the wait of the thread, now and later. Called by another one.
void endWriter();

// Waits until all failures are written down, where there is a writer, but no longer than
// `patience`.
void awaitWritten(Milliseconds patience);

}  // namespace torchcomms_pg::process_totals
