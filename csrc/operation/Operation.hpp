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

// Name of a record for which torch's analyser of flight recorders checks only that all ranks
// arrived, and no sizes. Every version of the analyser accepts the names of ProcessGroupNCCL.
inline constexpr char kUnchecked[] = "coalesced";

// Names, type and traits of a kind of operation.
struct OpTraits {
  OpKind kind;
  const char* name;                        // public name, e.g. "all_reduce"
  const char* title;                       // name of the operation's range in a profile
  const char* titleOfGloo;                 // the same in a group of backend "gloo"
  const char* profile;                     // ProcessGroupNCCL's name in profiles; tools look for it
  c10d::OpType type;                       // nearest type of c10d
  std::optional<OpName> hook;              // name in hooks; nullopt if hooks do not see it
  const char* recorded;                    // name in flight recorders; null if not recorded
  const char* recordedBatch = kUnchecked;  // the same for a batch of such operations
  std::optional<OpName> unevenHook = std::nullopt;  // name in hooks if parts differ in size
};
const OpTraits& traits(OpKind kind);

inline const char* name(OpKind kind) {
  return traits(kind).name;
}

// Returns whether the operation cannot end without its `peer`.
inline bool waitsForPeer(OpKind kind) {
  return kind == OpKind::send || kind == OpKind::recv || kind == OpKind::waitSignal;
}

// Returns whether the operation has a root, `peer`, that sends to or receives from all other ranks.
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

// Returns whether the root (or, without `root`, every other rank) only sends in the operation, and
// so may go on before the other ranks arrive.
inline bool onlyGives(OpKind kind, bool root) {
  return hasRoot(kind) && root == (kind == OpKind::broadcast || kind == OpKind::scatter);
}

// Returns whether the operation concerns the communicator itself. Such operations have no sequence
// number in the group.
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
  OpKind parts = OpKind::coalesced;  // kind of a batch's parts, if all are of one kind
  uint64_t seq = 0;         // number in the group, from 1; collectives and point-to-point apart
  bool collective = false;  // `seq` counts collectives
  int peer = -1;            // root of a collective, other rank of a message, put or signal; or -1
  int tag = 0;
  uint64_t number = 0;  // of a message: its place among messages of its kind with its peer, from 1
  std::shared_ptr<const std::vector<NumberedMessage>> messages;  // of a batch; null if no batch
  int64_t numelIn = 0;
  int64_t numelOut = 0;
  int64_t bytes = 0;  // the larger of its input and its output; of a batch: of all its parts
  c10::ScalarType dtype = c10::ScalarType::Byte;
  const char* reduceOp = nullptr;
  bool async = false;
  bool batched = false;     // a batch of one operation
  bool ordered = true;      // true if ordered by a stream; false only for some messages
  bool captured = false;    // recorded into a graph, whose replays run it
  Milliseconds timeout{0};  // counted from `issued`; includes `extra`
  Milliseconds extra{0};    // part of the timeout that was added for a while
  Clock::time_point issued;
  std::vector<int64_t> inputSplits;  // rows per rank of an uneven all-to-all
  std::vector<int64_t> outputSplits;
  std::shared_ptr<HookedOperation> hooked;      // null if no hook observes its end
  std::shared_ptr<const RecordedOp> recording;  // null if not recorded

  // Returns whether `seq` counts it as a message, and not as a collective.
  bool countsAsMessage() const { return isPointToPoint(kind) || (messages && !collective); }

  // Copies the deadline and the fields that describe() and diagnoses use. Does not allocate, and
  // keeps no object of a user, whose destruction may need the GIL.
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

// Returns whether the operation of `rank`, if still in flight, cannot end once the process of
// `other` is dead: because `rank` sends to `other`, or because both have to send. Data that `other`
// alone sends may already be on its way.
bool needsAlive(const Operation& op, int rank, int other);

// Returns the name of the operation's range in a profile, e.g. "torchcomms:all_reduce". In a group
// of backend "gloo" it is Gloo's name; on an accelerator it is the name of ProcessGroupNCCL, such
// as "nccl:send 0->1", for which tools look. `rank` is this rank.
std::string rangeName(const Operation& op, const Group& group, int rank, bool onAccelerator);

// Returns ProcessGroupNCCL's name of the operation in profiler records of the data moved.
const char* profileName(const Operation& op);

// Returns the numbers of elements in and out as ProcessGroupNCCL records them: all ranks record the
// root's numbers, and both sides of a message the same number twice.
std::pair<int64_t, int64_t> profileSizes(const Operation& op, int size);

// Describes the operation, e.g. "all_reduce #12 (1024 x Float, SUM)" or "send #3 to rank 2 (16 x
// Int)".
std::string describe(const Operation& op);

// Returns a text of what the ranks of a collective must agree on; empty for other operations and
// for batches. With `sizes`, it includes the number of elements if that must be the same on all
// ranks.
std::string signature(const Operation& op, bool sizes = false);

// Writes a duration, e.g. "2 s" or "0.5 s".
std::string inSeconds(Milliseconds duration);

// Joins ranks, e.g. "2" or "0, 2, 3".
std::string joinRanks(const std::vector<int>& ranks);

}  // namespace torchcomms_pg
