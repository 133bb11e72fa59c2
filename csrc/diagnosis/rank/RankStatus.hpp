// A rank's report in a diagnosis: fields for the rule of blame, and texts for people, which the
// rule does not read. Peers and members have their global ranks, since a report is about several
// groups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/rank/Fields.hpp"

namespace torchcomms_pg {

// Part of a list of ranks: `count` ranks, namely first, first + step, first + 2 * step and so on.
struct Run {
  int64_t first = 0;
  int64_t step = 0;
  uint64_t count = 0;

  static void fields(auto& self, auto& visit) { visit(self.first, self.step, self.count); }

  bool operator==(const Run&) const = default;
};

// Returns the ranks as runs: the groups of most programs have one or a few.
template <class Rank>
std::vector<Run> runsOf(const std::vector<Rank>& ranks) {
  std::vector<Run> runs;
  for (const int64_t rank : ranks) {
    auto* const last = runs.empty() ? nullptr : &runs.back();
    if (last != nullptr && last->count == 1) {
      last->step = rank - last->first;
      last->count = 2;
    } else if (
        last != nullptr && rank == last->first + last->step * static_cast<int64_t>(last->count)) {
      ++last->count;
    } else {
      runs.push_back({rank, 0, 1});
    }
  }
  return runs;
}

// Appends the ranks of the runs to `ranks`. Returns false if they are more than 2^20, since the
// text from which they were read is then damaged.
template <class Rank>
bool spread(const std::vector<Run>& runs, std::vector<Rank>& ranks) {
  constexpr uint64_t kMost = 1 << 20;
  for (const auto& run : runs) {
    if (run.count > kMost || ranks.size() + run.count > kMost) {
      return false;
    }
    for (uint64_t i = 0; i < run.count; ++i) {
      ranks.push_back(static_cast<Rank>(run.first + run.step * static_cast<int64_t>(i)));
    }
  }
  return true;
}

// A message or signal without which an operation cannot end.
struct AwaitedMessage {
  enum class Kind : uint8_t { send, receive, signal };
  static constexpr int64_t kAnyRank = -1;

  Kind kind = Kind::send;
  int64_t peer = kAnyRank;  // kAnyRank for a receive from any rank
  // The message's number, from 1, among the ones of its kind that the rank has issued with `peer`.
  // For a receive from any rank: one more than the number of the group's receives that have
  // succeeded, not counting batches.
  uint64_t number = 0;

  static void fields(auto& self, auto& visit) { visit(self.kind, self.peer, self.number); }

  bool operator==(const AwaitedMessage&) const = default;
};

// A collective that has to end before a wait can end: the awaited collective, or an earlier one,
// since a group's collectives end in order.
struct AwaitedCollective {
  uint64_t seq = 0;   // number among the group's collectives
  int64_t rank = -1;  // the only rank that has to arrive; -1 if all ranks have to arrive

  static void fields(auto& self, auto& visit) { visit(self.seq, self.rank); }
};

// An operation in which the rank waits. If `indirect`, no thread is known to wait, only a device's
// queue or perhaps the holder of a future, so that the rank's threads may go on.
struct Wait {
  std::string text;                            // names the group, unless the diagnosis is about it
  uint64_t group = 0;                          // see GroupCounts; 0 if the wait's needs are unknown
  std::vector<Run> members;                    // global ranks of the group
  std::vector<AwaitedCollective> collectives;  // oldest first
  std::vector<AwaitedMessage> messages;
  bool indirect = false;
  uint64_t thread = 0;     // the thread that waits, by threadNumber(); 0 if unknown or `indirect`
  std::string threadName;  // Python's name of the thread; empty if unknown

  static void fields(auto& self, auto& visit) {
    visit(
        self.text, self.group, self.members, self.collectives, self.messages, self.indirect,
        self.thread, self.threadName);
  }
};

// Returns whether both waits are for one operation. Ignores their texts.
inline bool isSameOperation(const Wait& one, const Wait& other) {
  if (one.group != other.group || one.collectives.empty() != other.collectives.empty()) {
    return false;
  }
  return one.collectives.empty() ? one.messages == other.messages
                                 : one.collectives.back().seq == other.collectives.back().seq;
}

// Numbers of messages and signals that the rank has issued with `peer`.
struct PeerCounts {
  int64_t peer = 0;
  uint64_t sent = 0;
  uint64_t received = 0;
  uint64_t signalled = 0;

  static void fields(auto& self, auto& visit) {
    visit(self.peer, self.sent, self.received, self.signalled);
  }
};

// Stands for an unknown thread. No threadNumber() has this value.
inline constexpr uint64_t kAnyThread = 1;

// Numbers of operations that the rank has issued in a group, and the threads that have issued the
// latest ones, by threadNumber(): 0 if none has, kAnyThread if that thread issues no more.
struct GroupCounts {
  uint64_t group = 0;  // hash of name and ranks: equal on all ranks, differs between groups
  uint64_t collectives = 0;
  uint64_t receivedFromAny = 0;
  std::vector<PeerCounts> peers;  // peers with messages
  uint64_t collectivesThread = 0;
  uint64_t sendsThread = 0;  // of messages and signals
  uint64_t receivesThread = 0;

  static void fields(auto& self, auto& visit) {
    visit(
        self.group, self.collectives, self.receivedFromAny, self.peers, self.collectivesThread,
        self.sendsThread, self.receivesThread);
  }
};

// Whether a thread of a rank is in an operation.
enum class Stand : uint8_t {
  issued,   // no thread is known to wait for the operation
  awaited,  // a thread waits for the operation, outside of the call that has issued it
  inCall,   // a thread is in the call
};

// The last operation of a group that has completed on a rank.
struct CompletedOp {
  std::string text;       // "" if none has
  uint64_t seq = 0;       // number among collectives; 0 if not a collective
  std::string signature;  // see RankStatus

  static void fields(auto& self, auto& visit) { visit(self.text, self.seq, self.signature); }
};

struct RankStatus {
  int rank = 0;  // in the group asked about
  // The group's oldest operation in flight, or "". Messages for which no thread waits do not count.
  std::string current;
  Stand stand = Stand::issued;      // of `current`
  uint64_t currentSeq = 0;          // number of `current` among collectives; 0 if not a collective
  std::string signature;            // what all ranks of the collective must agree on, or ""
  int64_t waitedMs = 0;             // time since the issue of `current`
  std::string calledAt;             // line of Python that issued `current`, or ""
  CompletedOp completed;            // in the group asked about
  std::string failure;              // why the group has failed on this rank, or ""
  std::string threads;              // where Python's threads are, one line each
  int64_t compilingMs = -1;         // time since the process began to compile; -1 if it does not
  int64_t compiledMs = -1;          // time since it last ended compiling; -1 if it never has
  int64_t relaxedMs = 0;            // rest of the time for which it has asked its peers to wait
  std::vector<Wait> waits;          // in operations of all groups
  std::vector<GroupCounts> counts;  // of all groups
  uint64_t mainThread = 0;          // the thread that issues what none has issued yet; 0 if unknown
  bool preliminary = false;         // true if Python has not told `threads` yet

  static void fields(auto& self, auto& visit) {
    visit(
        self.rank, self.current, self.stand, self.currentSeq, self.signature, self.waitedMs,
        self.calledAt, self.completed, self.failure, self.threads, self.compilingMs,
        self.compiledMs, self.relaxedMs, self.waits, self.counts, self.mainThread,
        self.preliminary);
  }
};

// Encode and decode a status; decodeStatus() returns nullopt if `text` is damaged or of another
// version.
inline std::string encode(const RankStatus& status) {
  return fields::write(status);
}
inline std::optional<RankStatus> decodeStatus(const std::string& text) {
  return fields::read<RankStatus>(text);
}

}  // namespace torchcomms_pg
