// A rank's report in a diagnosis: fields for the rule of blame, and texts for people, which the
// rule does not read. Peers and members have their global ranks, since a report is about several
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
  std::vector<int64_t> members;                // global ranks of the group
  std::vector<AwaitedCollective> collectives;  // oldest first
  std::vector<AwaitedMessage> messages;
  bool indirect = false;

  static void fields(auto& self, auto& visit) {
    visit(self.text, self.group, self.members, self.collectives, self.messages, self.indirect);
  }
};

// Returns whether both waits are for one operation. Ignores their texts.
bool isSameOperation(const Wait& one, const Wait& other);

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

// Numbers of operations that the rank has issued in a group.
struct GroupCounts {
  uint64_t group = 0;  // hash of name and ranks: equal on all ranks, differs between groups
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
  uint64_t currentSeq = 0;          // number of `current` among collectives; 0 if not a collective
  std::string signature;            // what all ranks of the collective must agree on, or ""
  int64_t waitedMs = 0;             // time since the issue of `current`
  std::string calledAt;             // line of Python that issued `current`, or ""
  std::string completed;            // last operation of the group that has completed, or ""
  std::string failure;              // why the group has failed on this rank, or ""
  std::string threads;              // where Python's threads are, one line each
  int64_t compilingMs = -1;         // time since the process began to compile; -1 if it does not
  int64_t compiledMs = -1;          // time since it last ended compiling; -1 if it never has
  int64_t relaxedMs = 0;            // rest of the time for which it has asked its peers to wait
  std::vector<Wait> waits;          // in operations of all groups
  std::vector<GroupCounts> counts;  // of all groups

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
