// The rule of blame: which ranks hold up an operation, by the ranks' own reports. A rank that has
// reported is late only if other ranks wait for it and it waits in no operation. Ranks that wait
// for each other form a circle, and none of them is late. Only one thread of a rank counts: the
// thread that is to issue what others wait for. It has issued such operations of the group before,
// or else it is the main thread. A wait of another thread does not hold it up, as far as is known.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "diagnosis/rank/RankStatus.hpp"

namespace torchcomms_pg {

// The operation that a diagnosis is about.
struct DiagnosisRequest {
  int rank = 0;  // the rank that asks
  std::string group;
  std::vector<int64_t> globalRanks;  // global ranks, by rank in the group; empty if both are equal
  std::vector<std::string> hosts;    // by rank; empty if all ranks are on one host
  int size = 0;
  std::string op;            // the operation's description
  uint64_t seq = 0;          // number among the group's collectives; 0 if not a collective
  std::string signature;     // see RankStatus
  Wait wait;                 // what the operation needs, and from which ranks
  int64_t timeoutMs = 0;     // the operation's timeout
  int64_t waitedMs = 0;      // time since the operation's issue
  std::vector<int> absent;   // ranks that the library reports as missing; empty if it cannot
  bool absentIsAll = false;  // true if the library knows that no other rank is missing
  bool queued = false;       // true on a device, where a rank arrives by queueing the operation
  bool ended = false;        // true if the operation has ended since the diagnosis began
  // true if only the waiting thread learns of the operation's end, so that the operation may have
  // ended unnoticed if all ranks have arrived
  bool mayHaveEnded = false;
  std::string disagreement;   // the library's error if ranks call different operations, or ""
  int64_t compileLeftMs = 0;  // remaining time to wait for ranks that compile

  int64_t global(int member) const {
    return static_cast<size_t>(member) < globalRanks.size() ? globalRanks[member] : member;
  }
};

// A rank that has not answered.
struct Silent {
  std::string text;   // what the verdict says about the rank
  bool gone = false;  // true if its process is dead or stopped
};

using Answers = std::map<int, RankStatus>;  // by rank
using SilentRanks = std::map<int, Silent>;  // the ranks without an answer

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

  std::vector<Late> late;   // in the order of the search, which begins at the operation asked about
  std::vector<int> gone;    // dead or stopped ranks that are certainly needed
  std::vector<int> silent;  // other ranks without an answer, which may be needed
  std::vector<Link> circle;  // empty if no circle explains the wait
  // The circle that would exist if a thread waited for another thread of its rank, which no report
  // tells. Empty if no such circle exists, or if `circle` is not empty.
  std::vector<Link> perhaps;
  bool certain = true;        // false if a rank of the circle may go on, see Wait::indirect
  std::vector<int> missing;   // ranks that have not arrived at the operation asked about
  std::vector<int> disagree;  // ranks whose operations have one number, but differ
  std::vector<int> passed;    // ranks of `disagree` that have completed this operation

  std::vector<int> lateRanks() const;
};

// Applies the rule, and returns its result.
Blame blame(const DiagnosisRequest& request, const Answers& answers, const SilentRanks& silent);

}  // namespace torchcomms_pg
