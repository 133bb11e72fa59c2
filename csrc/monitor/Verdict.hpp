// Decides from the answers of the ranks which of them hold up an operation. Knows nothing of torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace torchcomms_pg {

// Status of one rank and one group, as that rank tells it.
struct RankStatus {
  int rank = 0;
  uint64_t issued = 0;  // number of the group's collectives so far
  std::string current;  // the oldest operation in flight; empty: none
  uint64_t currentSeq = 0;
  int64_t waitedMs = 0;               // time since its issue
  std::string calledAt;               // the line of Python that issued it, where known
  std::string completed;              // last operation that has completed
  std::string failure;                // reason why the group has failed here
  std::string threads;                // places of Python's threads, one line for each
  int64_t compilingMs = -1;           // time since it has begun to compile; -1: it does not
  int64_t compiledMs = -1;            // time since it has last ended to compile; -1: never
  int64_t relaxedMs = 0;              // time that it has asked its peers to wait longer
  std::string elsewhere;              // operation of another group that a thread of it waits in
  std::vector<int64_t> elsewhereFor;  // ranks that operation waits for, global; empty: not known

  bool waitsFor(int64_t globalRank) const {
    return std::find(elsewhereFor.begin(), elsewhereFor.end(), globalRank) != elsewhereFor.end();
  }
};

// The operation that a diagnosis is about.
struct DiagnosisRequest {
  std::string group;
  std::vector<int64_t> globalRanks;  // those of the group's ranks; empty: the same numbers
  int size = 0;
  std::string op;
  bool pointToPoint = false;  // true: seq counts messages; RankStatus::issued says nothing of it
  int peer = -1;              // the other rank of a message
  uint64_t seq = 0;
  int64_t timeoutMs = 0;
  int64_t waitedMs = 0;      // time since its issue
  std::vector<int> absent;   // ranks that the library misses, where it can tell
  bool queued = false;       // ranks that have come need not have started: a device's queue is long
  std::string disagreement;  // the library's text about ranks that call different operations
  int64_t compileLeftMs = 0;  // time that it may still wait for ranks that compile
};

struct Verdict {
  std::vector<int> ranks;   // ranks that hold up the operation
  std::vector<int> silent;  // those of `ranks` that did not answer: they may have come
  std::string text;
  int64_t extensionMs =
      0;             // positive: nobody has failed; wait that much longer, for what `text` says
  int answered = 0;  // number of ranks that did
  bool disagree = false;  // true: the ranks call different operations, none is late
};

// Finds the verdict. `silent`: what else is known of the ranks without an answer.
Verdict judge(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, std::string>& silent);

std::string encode(const RankStatus& answer);
std::string encode(const Verdict& verdict);
// Decode a text. None: `text` is damaged, or another version's.
std::optional<RankStatus> decodeStatus(const std::string& text);
std::optional<Verdict> decodeVerdict(const std::string& text);

}  // namespace torchcomms_pg
