// The rule of blame: which ranks hold up an operation, by what the ranks tell of themselves. A rank
// is late only if others wait for it and it waits for nobody. Ranks that wait for each other are a
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
  std::vector<int64_t> globalRanks;  // those of the group's ranks; empty: the same numbers
  std::vector<std::string> hosts;    // by rank; empty: all are on one
  int size = 0;
  std::string op;         // its description
  uint64_t seq = 0;       // its place among the group's collectives; 0: not a collective
  std::string signature;  // see RankStatus
  Wait wait;              // what it needs of which ranks
  int64_t timeoutMs = 0;
  int64_t waitedMs = 0;      // time since its issue
  std::vector<int> absent;   // ranks that the library misses, if it can tell
  bool absentIsAll = false;  // true: the library misses no other rank at this operation
  bool queued = false;  // ranks that have arrived need not have started: a device's queue is long
  bool ended = false;   // the operation has ended since the diagnosis began
  bool mayHaveEnded =
      false;  // if all ranks have come: nobody is told of its end but who waits for it
  std::string disagreement;   // the library's text about ranks that call different operations
  int64_t compileLeftMs = 0;  // time that it may still wait for ranks that compile
};

// A rank that has not answered.
struct Silent {
  std::string text;   // what else is known of it
  bool gone = false;  // its process is dead, or stopped
};

struct Blame {
  // Ranks that have not arrived at `wait`, though the ranks of `waiting` wait in it.
  struct Late {
    Wait wait;
    std::vector<int> ranks;
    std::vector<int> waiting;
  };
  // A rank that waits for the next in the list, the last one for the first.
  struct Link {
    int rank;
    Wait wait;
  };

  std::vector<Late> late;   // what the operation asked about waits for comes first
  std::vector<int> gone;    // needed ranks without an answer, which are dead or stopped
  std::vector<int> silent;  // other ranks without an answer, which may be needed
  std::vector<Link> circle;
  bool certain = true;        // false: a rank of the circle may go on, see Wait::indirect
  std::vector<int> missing;   // ranks that have not arrived at the operation asked about
  std::vector<int> disagree;  // ranks in another operation with the same number

  std::vector<int> lateRanks() const;
};

// `silent`: the ranks without an answer.
Blame blame(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, Silent>& silent);

}  // namespace torchcomms_pg
