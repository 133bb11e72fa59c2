// Description of one operation, for errors, logs and the monitor.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/TorchCompat.hpp"
#include "operation/Group.hpp"
#include "operation/OpName.hpp"

namespace torchcomms_pg {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

enum class OpKind : uint8_t {
  allReduce,
  broadcast,
  reduce,
  allGather,
  allGatherSingle,
  reduceScatter,
  reduceScatterSingle,
  allToAll,
  allToAllSingle,
  gather,
  gatherSingle,
  scatter,
  send,
  recv,
  barrier,
  monitoredBarrier,
  coalesced,
  newWindow,
  tensorRegister,
  tensorDeregister,
  put,
  signal,
  waitSignal,
  split,
  shrink,
  registerMemory,
  suspend,
  resume,
  initialization,
};
inline constexpr size_t kOpKinds = static_cast<size_t>(OpKind::initialization) + 1;

// Name under which torch's analyser of flight recorders checks only that all ranks came, and no
// sizes. Every version knows the names of ProcessGroupNCCL.
inline constexpr char kUnchecked[] = "coalesced";

// Names, type and traits of a kind of operation.
struct OpTraits {
  OpKind kind;
  const char* name;                        // public name, e.g. "all_reduce"
  const char* title;                       // name of its range in a profile
  const char* titleOfGloo;                 // the same in a group that is called gloo
  const char* profile;                     // ProcessGroupNCCL's name in profiles; tools look for it
  c10d::OpType type;                       // nearest type of c10d
  std::optional<OpName> hook;              // name in hooks; none: no operation of a user
  const char* recorded;                    // name in flight recorders; null: it is in none
  const char* recordedBatch = kUnchecked;  // the same for a batch of such operations
  std::optional<OpName> unevenHook = std::nullopt;  // name in hooks where its parts differ in size
};
const OpTraits& traits(OpKind kind);

inline const char* name(OpKind kind) {
  return traits(kind).name;
}

// Returns whether it cannot end without its `peer`.
inline bool waitsForPeer(OpKind kind) {
  return kind == OpKind::send || kind == OpKind::recv || kind == OpKind::waitSignal;
}

// Returns whether one rank gives or gets what all others get or give; `peer` is its root.
inline bool hasRoot(OpKind kind) {
  switch (kind) {
    case OpKind::broadcast:
    case OpKind::reduce:
    case OpKind::gather:
    case OpKind::gatherSingle:
    case OpKind::scatter: return true;
    default: return false;
  }
}

// Returns whether the root, or every other rank, only gives, and so may go on before the others
// come.
inline bool onlyGives(OpKind kind, bool root) {
  return hasRoot(kind) && root == (kind == OpKind::broadcast || kind == OpKind::scatter);
}

// Returns whether it concerns the communicator itself, and has no number in the group's order.
inline bool isManagement(OpKind kind) {
  return kind >= OpKind::registerMemory;
}

inline bool isPointToPoint(OpKind kind) {
  return waitsForPeer(kind) || kind == OpKind::put || kind == OpKind::signal;
}

class RecordedOp;
struct HookedOperation;

// A message of a batch.
struct NumberedMessage {
  OpKind kind;
  int peer;
  uint64_t number;  // see Operation::number
};

struct Operation {
  OpKind kind = OpKind::allReduce;
  OpKind parts = OpKind::coalesced;  // kind of a coalesced one's parts, where these are of one kind
  uint64_t seq = 0;  // counts collectives and point-to-point operations of a group apart, from 1
  bool collective = false;  // `seq` counts collectives
  int peer = -1;  // root of a collective, other side of a message, put or signal; -1: none
  int tag = 0;
  uint64_t number = 0;  // of a message: place among those of its kind with its peer, from 1
  std::shared_ptr<const std::vector<NumberedMessage>> messages;  // those of a batch; null: no batch
  int64_t numelIn = 0;
  int64_t numelOut = 0;
  int64_t bytes = 0;  // of its input or its output, the larger of both; of a batch of all parts
  c10::ScalarType dtype = c10::ScalarType::Byte;
  const char* reduceOp = nullptr;
  bool async = false;
  bool batched = false;     // a batch of its own, of one
  bool ordered = true;      // ordered by a stream; only messages may not be
  bool captured = false;    // recorded into a graph, whose replays run it
  Milliseconds timeout{0};  // counted from `issued`; includes `extra`
  Milliseconds extra{0};    // part of the timeout that was added for a while
  Clock::time_point issued;
  std::vector<int64_t> inputSplits;  // rows per rank of an uneven all-to-all
  std::vector<int64_t> outputSplits;
  std::shared_ptr<HookedOperation> hooked;      // null: no hook is told of its end
  std::shared_ptr<const RecordedOp> recording;  // null: not recorded

  // Returns whether its number is that of a message, and not of a collective.
  bool countsAsMessage() const { return isPointToPoint(kind) || (messages && !collective); }

  // Takes over what describe() and diagnoses tell, and the deadline. Does not allocate, and keeps
  // no object of a user, which may need the GIL to go.
  void noteFrom(const Operation& other) {
    kind = other.kind;
    seq = other.seq;
    peer = other.peer;
    tag = other.tag;
    numelIn = other.numelIn;
    numelOut = other.numelOut;
    dtype = other.dtype;
    reduceOp = other.reduceOp;
    collective = other.collective;
    number = other.number;
    messages = other.messages;
    timeout = other.timeout;
    issued = other.issued;
  }
};

// Returns whether the operation of `rank` cannot end, unless it has by now, once the process of
// `other` is dead: it gives that one something, or both have to give. What `other` alone gives may
// be under way.
bool needsAlive(const Operation& op, int rank, int other);

// Returns the name of the operation's range in a profile, e.g. "torchcomms:all_reduce"; Gloo's name
// in a group that is called gloo, and that of ProcessGroupNCCL on an accelerator, such as
// "nccl:send 0->1", for which tools look. `rank`: this one's.
std::string rangeName(const Operation& op, const Group& group, int rank, bool onAccelerator);

// Returns ProcessGroupNCCL's name of the operation in records of what it moves.
const char* profileName(const Operation& op);

// Returns the numbers of elements in and out as ProcessGroupNCCL records them: of what the root
// has, on all ranks, and of a message on both sides.
std::pair<int64_t, int64_t> profileSizes(const Operation& op, int size);

// Describes the operation, e.g. "all_reduce #12 (1024 x Float, SUM)" or "send #3 to rank 2 (16 x
// Int)".
std::string describe(const Operation& op);

// Returns what the ranks of a collective have to agree on; empty: it is none, or a batch. `sizes`:
// with the number of elements, where it has to be the same on all ranks.
std::string signature(const Operation& op, bool sizes = false);

// Writes a duration, e.g. "2 s" or "0.5 s".
std::string inSeconds(Milliseconds duration);

// Joins ranks, e.g. "2" or "0, 2, 3".
std::string joinRanks(const std::vector<int>& ranks);

}  // namespace torchcomms_pg
