// A rank's report in a diagnosis: fields for the rule of blame, and texts for people. No rule reads
// a text. Peers and members are numbered in the job ("global"), since an answer covers several
// groups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchcomms_pg {

// A message or signal without which an operation cannot end.
struct AwaitedMessage {
  enum class Kind : uint8_t { send, receive, signal };
  static constexpr int64_t kAnyRank = -1;

  Kind kind = Kind::send;
  int64_t peer = kAnyRank;  // kAnyRank for a receive from any rank
  // Number among this kind that the rank has issued with `peer`. For a receive from any rank: one
  // more than the number of the group's receives that have ended, not counting batches.
  uint64_t number = 0;

  static void fields(auto& self, auto& visit) { visit(self.kind, self.peer, self.number); }

  bool operator==(const AwaitedMessage&) const = default;
};

// A collective that a wait needs: the one in which the thread waits, or an earlier one of the
// group, since they end in order.
struct AwaitedCollective {
  uint64_t seq = 0;   // number among the group's collectives
  int64_t rank = -1;  // the only rank that has to arrive or end; -1 if all ranks have to arrive

  static void fields(auto& self, auto& visit) { visit(self.seq, self.rank); }
};

// An operation that the rank waits in. If `indirect`, only the queue of its device waits, or the
// holder of a future, so that the rank's threads may go on.
struct Wait {
  std::string text;              // includes the group unless it is the one asked about
  uint64_t group = 0;            // see GroupCounts; 0 if its needs are unknown
  std::vector<int64_t> members;  // ranks of the group
  std::vector<AwaitedCollective> collectives;  // oldest first
  std::vector<AwaitedMessage> messages;
  bool indirect = false;

  static void fields(auto& self, auto& visit) {
    visit(self.text, self.group, self.members, self.collectives, self.messages, self.indirect);
  }
};

// Returns whether both belong to one operation, whatever their texts.
bool isSameOperation(const Wait& one, const Wait& other);

// Numbers of messages that the rank has issued with `peer`.
struct PeerCounts {
  int64_t peer = 0;
  uint64_t sent = 0;
  uint64_t received = 0;
  uint64_t signalled = 0;

  static void fields(auto& self, auto& visit) {
    visit(self.peer, self.sent, self.received, self.signalled);
  }
};

// Numbers of operations that the rank has issued in a group.
struct GroupCounts {
  uint64_t group = 0;  // hash of the name and ranks: equal on all ranks, unlike other groups'
  uint64_t collectives = 0;
  uint64_t receivedFromAny = 0;
  std::vector<PeerCounts> peers;  // peers with messages

  static void fields(auto& self, auto& visit) {
    visit(self.group, self.collectives, self.receivedFromAny, self.peers);
  }
};

struct RankStatus {
  int rank = 0;                     // in the group asked about
  std::string current;              // the group's oldest operation in flight, or ""
  uint64_t currentSeq = 0;          // its number among the collectives; 0 if not a collective
  std::string signature;            // what the ranks of that collective have to agree on, or ""
  int64_t waitedMs = 0;             // time since its issue
  std::string calledAt;             // line of Python that issued it, if known
  std::string completed;            // last operation that has completed
  std::string failure;              // why the group has failed on this rank
  std::string threads;              // where Python's threads are, one line each
  int64_t compilingMs = -1;         // time since it started to compile; -1 if it does not compile
  int64_t compiledMs = -1;          // time since it last stopped compiling; -1 if it never compiled
  int64_t relaxedMs = 0;            // remaining time for which it has asked its peers to wait
  std::vector<Wait> waits;          // in all groups
  std::vector<GroupCounts> counts;  // of the group asked about and all others

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

// Encode and decode a status; decodeStatus() returns nullopt if `text` is damaged or of another
// version.
std::string encode(const RankStatus& status);
std::optional<RankStatus> decodeStatus(const std::string& text);

}  // namespace torchcomms_pg
