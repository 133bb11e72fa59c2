// The rule of blame: which ranks hold up an operation, by the ranks' own reports. A rank is late
// only if others wait for it and it waits for no rank. Ranks that wait for each other form a
// circle, and none of them is late.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "monitor/RankStatus.hpp"

namespace torchcomms_pg {

// The operation that a diagnosis is about.
struct DiagnosisRequest {
  int rank = 0;  // the rank that asks
  std::string group;
  std::vector<int64_t> globalRanks;  // the group's ranks in the job; empty if numbered alike
  std::vector<std::string> hosts;    // by rank; empty if all are on one host
  int size = 0;
  std::string op;         // its description
  uint64_t seq = 0;       // number among the group's collectives; 0 if not a collective
  std::string signature;  // see RankStatus
  Wait wait;              // what it needs, and from which ranks
  int64_t timeoutMs = 0;
  int64_t waitedMs = 0;      // time since its issue
  std::vector<int> absent;   // ranks that the library reports as missing, if it can
  bool absentIsAll = false;  // true if the library misses no other rank at this operation
  bool queued = false;       // true on a device, where a rank arrives by queueing the operation
  bool ended = false;        // the operation has ended since the diagnosis began
  // true if only the thread that waits for it learns of its end: it may have ended once all arrived
  bool mayHaveEnded = false;
  std::string disagreement;   // the library's error about ranks that call different operations
  int64_t compileLeftMs = 0;  // remaining time to wait for ranks that compile
};

// A rank that has not answered.
struct Silent {
  std::string text;   // what the verdict says about it
  bool gone = false;  // its process is dead, or stopped
};

struct Blame {
  // Ranks that have not arrived at `wait`, in which the ranks of `waiting` wait.
  struct Late {
    Wait wait;
    std::vector<int> ranks;
    std::vector<int> waiting;
  };
  // A rank that waits for the next one in the list; the last one waits for the first.
  struct Link {
    int rank;
    Wait wait;
  };

  std::vector<Late> late;   // the ranks that the operation asked about waits for come first
  std::vector<int> gone;    // needed ranks without an answer that are dead or stopped
  std::vector<int> silent;  // other ranks without an answer that may be needed
  std::vector<Link> circle;
  bool certain = true;        // false if a rank of the circle may go on, see Wait::indirect
  std::vector<int> missing;   // ranks that have not arrived at the operation asked about
  std::vector<int> disagree;  // ranks in different operations with the same number

  std::vector<int> lateRanks() const;
};

// Applies the rule. `silent`: the ranks without an answer.
Blame blame(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, Silent>& silent);

}  // namespace torchcomms_pg
