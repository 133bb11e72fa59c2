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

#include "base/Text.hpp"
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

// Name of records of which torch's analyser of flight recorders checks only that all ranks have
// arrived, and not the sizes. Every version of the analyser knows it, as ProcessGroupNCCL uses it.
inline constexpr char kUnchecked[] = "coalesced";

// Names, type and traits of a kind of operation.
struct OpTraits {
  OpKind kind;
  const char* name;                           // public name, e.g. "all_reduce"
  c10d::OpType type;                          // most similar type of c10d
  std::optional<OpName> hook = std::nullopt;  // name in hooks; nullopt if no hook is called
  const char* recorded = nullptr;             // name in flight recorders; null if not recorded
  const char* profile = name;              // ProcessGroupNCCL's name in profiles; tools look for it
  const char* recordedBatch = kUnchecked;  // `recorded` for a batch of such operations
  const char* gloo = name;                 // Gloo's name in profiles
  std::optional<OpName> unevenHook = std::nullopt;  // replaces `hook` if parts differ in size
};
const OpTraits& traits(OpKind kind);

inline const char* name(OpKind kind) {
  return traits(kind).name;
}

// Returns whether the operation ends only after one other rank, its `peer`, has acted.
inline bool waitsForPeer(OpKind kind) {
  return kind == OpKind::send || kind == OpKind::recv || kind == OpKind::waitSignal;
}

// Returns whether the operation has a root, its `peer`, which sends to or receives from all others.
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

// Returns whether the root only sends in the operation or, if `root` is false, whether every other
// rank does. Such a rank may go on before the other ranks arrive.
inline bool onlyGives(OpKind kind, bool root) {
  return hasRoot(kind) && root == (kind == OpKind::broadcast || kind == OpKind::scatter);
}

// Returns whether the operation starts, suspends or resumes a communicator, or registers memory
// with it. Such an operation has no sequence number in the group.
inline bool isManagement(OpKind kind) {
  return kind >= OpKind::registerMemory;
}

inline bool isPointToPoint(OpKind kind) {
  return waitsForPeer(kind) || kind == OpKind::put || kind == OpKind::signal;
}

class RecordedOp;
struct HookedOperation;

// A message, signal or wait for a signal in a batch.
struct NumberedMessage {
  OpKind kind;
  int peer;
  uint64_t number;  // see Operation::number
};

struct Operation {
  OpKind kind = OpKind::allReduce;
  OpKind parts = OpKind::coalesced;  // kind of all parts of a batch; `coalesced` if they differ
  uint64_t seq = 0;         // number among the group's collectives, or its messages, from 1
  bool collective = false;  // true if `seq` counts collectives, false if messages
  int peer = -1;            // root of a collective; other rank of a message, put or signal; else -1
  int tag = 0;
  uint64_t number = 0;  // number of a message of this kind with this peer, from 1; else 0
  std::shared_ptr<const std::vector<NumberedMessage>>
      messages{};  // of a batch; null if not a batch
  int64_t numelIn = 0;
  int64_t numelOut = 0;
  int64_t bytes = 0;  // of the larger of input and output; for a batch the sum over its parts
  c10::ScalarType dtype = c10::ScalarType::Byte;
  const char* reduceOp = nullptr;
  bool async = false;
  bool batched = false;     // true if it is the only operation of a batch
  bool ordered = true;      // false for messages that no stream orders
  bool captured = false;    // true if captured into a graph, whose replays run it
  Milliseconds timeout{0};  // counted from `issued`; includes `extra`
  Milliseconds extra{0};    // part of `timeout` that was added temporarily
  Clock::time_point issued{};
  std::vector<int64_t> inputSplits{};  // rows for each rank; empty if all are equal
  std::vector<int64_t> outputSplits{};
  std::shared_ptr<HookedOperation> hooked{};      // null if no hook is called at its end
  std::shared_ptr<const RecordedOp> recording{};  // null if not recorded

  // Returns whether `seq` is a number among the group's messages, and not among its collectives.
  bool countsAsMessage() const { return isPointToPoint(kind) || (messages && !collective); }

  // Copies the deadline and the fields that describe() and diagnoses use. Does not allocate. Copies
  // no reference to a user's object, whose destruction may need the GIL.
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

// Returns whether the operation of `rank`, if still in flight, can no longer end after the process
// of `other` has died: `rank` sends to `other`, or all ranks of the collective send to all. If only
// `other` sends, the operation may end: the data may have been sent before.
bool needsAlive(const Operation& op, int rank, int other);

// Returns the name of the operation's range in a profile, e.g. "torchcomms:all_reduce". In a group
// of backend "gloo" the name is Gloo's. On an accelerator it is ProcessGroupNCCL's, such as
// "nccl:send 0->1", for which tools look. `rank` is this rank.
std::string rangeName(const Operation& op, const Group& group, int rank, bool onAccelerator);

// Returns ProcessGroupNCCL's name for the operation in profiler records of moved data.
const char* profileName(const Operation& op);

// Returns the numbers of input and output elements as ProcessGroupNCCL records them. All ranks
// record the root's numbers. Each side of a message records one number as both.
std::pair<int64_t, int64_t> profileSizes(const Operation& op, int size);

// Describes the operation, e.g. "all_reduce #12 (1024 x Float, SUM)" or "send #3 to rank 2 (16 x
// Int)".
std::string describe(const Operation& op);

// Returns a text that must be equal on all ranks of a collective; empty for other operations and
// for batches. With `sizes`, the text includes the number of elements if it must be equal.
std::string signature(const Operation& op, bool sizes = false);

}  // namespace torchcomms_pg
