// What one operation is, as errors, logs and the monitor tell of it.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/TorchCompat.hpp"
#include "comm/Group.hpp"
#include "comm/OpName.hpp"

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

// What torch's analyser of flight recorders calls an operation of which it is to check only that
// all ranks came, and no sizes. It knows, in every version, the names of ProcessGroupNCCL.
inline constexpr char kUnchecked[] = "coalesced";

// What is known of each kind of operation.
struct OpTraits {
  OpKind kind;
  const char* name;            // the public one, e.g. "all_reduce"
  const char* title;           // of its range in a profile
  const char* titleOfGloo;     // the same, of a group that is called gloo
  const char* profile;         // what ProcessGroupNCCL calls it in profiles; tools look for it
  c10d::OpType type;           // the nearest of c10d
  std::optional<OpName> hook;  // what hooks know it by; none: no operation of a user
  const char* recorded;        // in flight recorders; null: it is in none
  const char* recordedBatch = kUnchecked;           // of a batch of such operations
  std::optional<OpName> unevenHook = std::nullopt;  // where its parts differ in size
};
const OpTraits& traits(OpKind kind);

inline const char* name(OpKind kind) {
  return traits(kind).name;
}

// Whether it cannot end without its `peer`.
inline bool waitsForPeer(OpKind kind) {
  return kind == OpKind::send || kind == OpKind::recv || kind == OpKind::waitSignal;
}

// Whether it is of the communicator itself, and has no number in the group's order.
inline bool isManagement(OpKind kind) {
  return kind >= OpKind::registerMemory;
}

inline bool isPointToPoint(OpKind kind) {
  return waitsForPeer(kind) || kind == OpKind::put || kind == OpKind::signal;
}

class RecordedOp;
struct HookedOperation;

struct Operation {
  OpKind kind = OpKind::allReduce;
  OpKind parts = OpKind::coalesced;  // those of a coalesced one, where c10d has a function for it
  uint64_t seq = 0;  // counts collectives and point-to-point operations of a group apart, from 1
  int peer = -1;     // root of a collective, other side of a message, put or signal; -1: none
  int tag = 0;
  int64_t numelIn = 0;
  int64_t numelOut = 0;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  const char* reduceOp = nullptr;
  bool async = false;
  bool ordered = true;      // by a stream; messages alone are not
  bool captured = false;    // in a graph, whose replays run it
  Milliseconds timeout{0};  // all of it, counted from `issued`
  Milliseconds extra{0};    // how much of it was added for a while
  Clock::time_point issued;
  std::vector<int64_t> inputSplits;  // of an uneven all-to-all
  std::vector<int64_t> outputSplits;
  std::shared_ptr<HookedOperation> hooked;      // null: no hook wants to be told of its end
  std::shared_ptr<const RecordedOp> recording;  // null: nobody records it

  // Takes over what describe() tells, without allocating.
  void noteFrom(const Operation& other) {
    kind = other.kind;
    seq = other.seq;
    peer = other.peer;
    tag = other.tag;
    numelIn = other.numelIn;
    numelOut = other.numelOut;
    dtype = other.dtype;
    reduceOp = other.reduceOp;
  }
};

// The name of the operation's range in a profile, e.g. "torchcomms:all_reduce"; of a group that is
// called gloo, the one that Gloo has.
const char* profilingTitle(const Operation& op, const Group& group);

// E.g. "all_reduce #12 (1024 x Float, SUM)" or "send #3 to rank 2 (16 x Int)".
std::string describe(const Operation& op);

// E.g. "2 s" or "0.5 s".
std::string inSeconds(Milliseconds duration);

// E.g. "2" or "0, 2, 3".
std::string joinRanks(const std::vector<int>& ranks);

}  // namespace torchcomms_pg
