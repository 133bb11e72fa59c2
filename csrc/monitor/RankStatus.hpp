// What a rank tells of itself in a diagnosis: fields for the rules of blame, texts for people. No
// rule reads a text. Ranks are the job's ("global"), since operations of several groups meet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchcomms_pg {

// A message or signal that an operation cannot end without.
struct AwaitedMessage {
  enum class Kind : uint8_t { send, receive, signal };
  static constexpr int64_t kAnyRank = -1;

  Kind kind = Kind::send;
  int64_t peer = kAnyRank;  // kAnyRank: whoever sends first
  // Place among those of this kind that the rank has issued with `peer`. Of a receive from any
  // rank: one more than the receives of the group that have ended, but for those of batches.
  uint64_t number = 0;

  static void fields(auto& self, auto& visit) { visit(self.kind, self.peer, self.number); }

  bool operator==(const AwaitedMessage&) const = default;
};

// A collective that a wait needs: the one that the thread waits in, and those before it in the
// group, since they end in order.
struct AwaitedCollective {
  uint64_t seq = 0;   // place among the group's collectives
  int64_t rank = -1;  // the one rank that it waits for, or for whose end; -1: all have to come

  static void fields(auto& self, auto& visit) { visit(self.seq, self.rank); }
};

// An operation that a thread of the rank waits in; or, if `indirect`, only the queue of its device
// or whoever holds its future, so that the rank's threads may go on.
struct Wait {
  std::string text;                            // names the group, unless it is the one asked about
  uint64_t group = 0;                          // see GroupCounts; 0: what it needs is not known
  std::vector<int64_t> members;                // ranks of the group
  std::vector<AwaitedCollective> collectives;  // the oldest first
  std::vector<AwaitedMessage> messages;
  bool indirect = false;

  static void fields(auto& self, auto& visit) {
    visit(self.text, self.group, self.members, self.collectives, self.messages, self.indirect);
  }
};

// Returns whether both are parts of one operation, whatever their texts say.
bool isSameOperation(const Wait& one, const Wait& other);

// Number of messages between the rank and `peer` that the rank has issued.
struct PeerCounts {
  int64_t peer = 0;
  uint64_t sent = 0;
  uint64_t received = 0;
  uint64_t signalled = 0;

  static void fields(auto& self, auto& visit) {
    visit(self.peer, self.sent, self.received, self.signalled);
  }
};

// Number of operations of a group that the rank has issued.
struct GroupCounts {
  uint64_t group = 0;  // the same on all ranks, and no other group's: a hash of name and ranks
  uint64_t collectives = 0;
  uint64_t receivedFromAny = 0;
  std::vector<PeerCounts> peers;  // those with messages

  static void fields(auto& self, auto& visit) {
    visit(self.group, self.collectives, self.receivedFromAny, self.peers);
  }
};

struct RankStatus {
  int rank = 0;              // in the group asked about
  std::string current;       // the group's oldest operation in flight; empty: none
  uint64_t currentSeq = 0;   // its place among the collectives; 0: not a collective
  std::string signature;     // what the ranks of that collective have to agree on; empty: nothing
  int64_t waitedMs = 0;      // time since its issue
  std::string calledAt;      // the line of Python that issued it, if known
  std::string completed;     // last operation that has completed
  std::string failure;       // reason why the group has failed here
  std::string threads;       // places of Python's threads, one line for each
  int64_t compilingMs = -1;  // time since it has begun to compile; -1: it does not
  int64_t compiledMs = -1;   // time since it has last ended to compile; -1: never
  int64_t relaxedMs = 0;     // time that it has asked its peers to wait longer
  std::vector<Wait> waits;   // all groups'
  std::vector<GroupCounts> counts;  // of the group asked about, and of every other

  static void fields(auto& self, auto& visit) {
    visit(
        self.rank,
        self.current,
        self.currentSeq,
        self.signature,
        self.waitedMs,
        self.calledAt,
        self.completed,
        self.failure,
        self.threads,
        self.compilingMs,
        self.compiledMs,
        self.relaxedMs,
        self.waits,
        self.counts);
  }
};

// Encodes, and decodes: none if `text` is damaged, or another version's.
std::string encode(const RankStatus& status);
std::optional<RankStatus> decodeStatus(const std::string& text);

}  // namespace torchcomms_pg
