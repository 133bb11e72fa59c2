// Totals of all groups of this process, and news of failures for the thread that writes the totals.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/lateness/Lateness.hpp"
#include "operation/GroupTotals.hpp"

// A forked child has separate groups, and therefore separate totals. Thread-safe.
namespace torchcomms_pg::process_totals {

// Number of ended groups whose sums are kept separately. The sums of groups that ended earlier are
// added up under the name kOthers.
inline constexpr size_t kEnded = 64;
inline constexpr char kOthers[] = "(others)";

// Totals of the groups of one name and backend, on several devices or one after another.
struct Group {
  struct Operation {
    OpKind kind = OpKind::allReduce;
    GroupTotals::Sums sums;
  };

  std::string name;
  std::string backend;
  bool watched = false;
  bool live = false;  // whether at least one of them has not ended
  uint64_t inFlight = 0;
  Clock::duration oldest{0};                // age of the oldest operation in flight, or 0
  uint64_t failures = 0;                    // see GroupTotals::noteFailure
  std::vector<RankLateness> lateness = {};  // by rank; empty if this process knows none
  std::vector<Operation> operations =
      {};  // kinds with an operation that has ended or was waited for
};

struct Totals {
  int64_t rank = -1;  // global rank in this process's first group; -1 before the first
  std::vector<Group> groups;
};

// Adds the totals of a new group, which counts as ended when the caller's references to them are
// gone. `rank`: this process's global rank.
void add(std::shared_ptr<GroupTotals> totals, int64_t rank);

// Keeps the last judgement of the lateness of the group's ranks, which may be null, once the group
// has ended.
void keepLateness(const GroupTotals& group, std::shared_ptr<const Lateness> last);

// Returns the totals. First polls devices for the ends of operations, for half a second at most.
Totals read();

// Notifies the writer of a failure of a group or a verdict on it.
void noteFailure();

// Functions of the writer, the one thread that writes the totals down.
//
// Waits until more than `written` failures have happened, for at most `patience`. Returns the
// number of failures, or nullopt after endWriter(). `written`: number of failures already written
// down.
std::optional<uint64_t> awaitFailure(uint64_t written, Milliseconds patience);
// Makes the writer's present and later waits return nullopt. Called by another thread.
void endWriter();

// Waits until the writer, if any, has written down all failures, for at most `patience`.
void awaitWritten(Milliseconds patience);

}  // namespace torchcomms_pg::process_totals
