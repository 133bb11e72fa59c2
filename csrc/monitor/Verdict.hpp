// Who holds up an operation: what the ranks answer, and what follows from it.
// Knows nothing of torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace torchcomms_pg {

// What one rank says about itself and one group.
struct RankStatus {
  int rank = 0;
  uint64_t issued = 0;  // collectives of the group so far
  std::string current;  // the oldest operation in flight; empty: none
  uint64_t currentSeq = 0;
  int64_t waitedMs = 0;               // since its issue
  std::string calledAt;               // the line of Python that issued it, where known
  std::string enqueued;               // the last that was issued
  std::string completed;              // the last that has completed
  std::string failure;                // why the group has failed here
  std::string threads;                // where Python is, one line for each thread
  int64_t compilingMs = -1;           // since it has begun to compile; -1: it does not
  int64_t compiledMs = -1;            // since it has last ended to compile; -1: never
  int64_t relaxedMs = 0;              // how much longer it has asked its peers to wait
  std::string elsewhere;              // the operation of another group that a thread of it waits in
  std::vector<int64_t> elsewhereFor;  // whom that waits for, by global rank; empty: not known

  bool waitsFor(int64_t globalRank) const {
    return std::find(elsewhereFor.begin(), elsewhereFor.end(), globalRank) != elsewhereFor.end();
  }
};

// What is asked about.
struct DiagnosisRequest {
  std::string group;
  std::vector<int64_t> globalRanks;  // of the group's ranks; empty: the same numbers
  int size = 0;
  std::string op;
  bool pointToPoint = false;  // seq is of messages; Answer::issued says nothing of it
  int peer = -1;              // of a message
  uint64_t seq = 0;
  int64_t timeoutMs = 0;
  int64_t waitedMs = 0;      // since its issue
  std::vector<int> absent;   // whom the library misses, where it can tell
  bool queued = false;       // ranks that have come need not have started: a device's queue is long
  std::string disagreement;  // what the library says of ranks that call different operations
  int64_t compileLeftMs = 0;  // how much longer it may wait for ranks that compile
};

struct Verdict {
  std::vector<int> ranks;   // that hold up the operation
  std::vector<int> silent;  // those of them that did not answer: they may have come
  std::string text;
  int64_t extensionMs =
      0;             // positive: nobody has failed; wait that much longer, for what `text` says
  int answered = 0;  // ranks that did
  bool disagree = false;  // the ranks call different operations: none is late
};

// `silent`: of ranks without an answer, what else is known of them.
Verdict judge(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, std::string>& silent);

std::string encode(const RankStatus& answer);
std::string encode(const Verdict& verdict);
// None: `text` is damaged, or another version's.
std::optional<RankStatus> decodeStatus(const std::string& text);
std::optional<Verdict> decodeVerdict(const std::string& text);

}  // namespace torchcomms_pg
