#include "comm/RecorderSet.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/TorchCompat.hpp"
#include "comm/Buffers.hpp"
#include "comm/Communicator.hpp"
#include "comm/Inquiring.hpp"
#include "nccl/Library.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

// Names that torch's analyser knows in every version, which are those of
// ProcessGroupNCCL. "coalesced" is for what has none: the analyser then checks
// that all ranks came, and no sizes.
constexpr const char* kUnchecked = "coalesced";

const char* batchName(OpKind member) {
  switch (member) {
    case OpKind::allReduce: return "allreduce_coalesced";
    case OpKind::allGather: return "ALLGATHER_coalesced";
    case OpKind::allGatherSingle: return "all_gather_into_tensor_coalesced";
    case OpKind::reduceScatter: return "REDUCE_SCATTER_coalesced";
    case OpKind::reduceScatterSingle: return "reduce_scatter_tensor_coalesced";
    default: return kUnchecked;
  }
}

const char* recordedName(const PreparedOp& call) {
  switch (call.op.kind) {
    case OpKind::allReduce: return "all_reduce";
    case OpKind::broadcast: return "broadcast";
    case OpKind::reduce: return "reduce";
    // Uneven parts: the ranks' own sizes differ, which the analyser would call an error.
    case OpKind::allGather: return sameNumel(call.outputs) ? "all_gather" : kUnchecked;
    case OpKind::allGatherSingle: return "_all_gather_base";
    case OpKind::reduceScatter: return sameNumel(call.inputs) ? "reduce_scatter" : kUnchecked;
    case OpKind::reduceScatterSingle: return "_reduce_scatter_base";
    case OpKind::allToAll:
    case OpKind::allToAllSingle: return "all_to_all";
    case OpKind::gather:
    case OpKind::gatherSingle: return "gather";
    case OpKind::scatter: return "scatter";
    case OpKind::send: return "send";
    case OpKind::recv: return "recv";
    case OpKind::barrier:
    case OpKind::monitoredBarrier: return "all_reduce_barrier";
    case OpKind::split: return kAnalyserKnowsSplits ? "split" : kUnchecked;
    case OpKind::coalesced: {
      if (!call.members) {
        return kUnchecked;
      }
      const auto& members = *call.members;
      const auto kind = members.front().op.kind;
      const bool alike = std::all_of(members.begin(), members.end(), [&](const PreparedOp& member) {
        return member.op.kind == kind;
      });
      return alike ? batchName(kind) : kUnchecked;
    }
    case OpKind::newWindow: return kAnalyserKnowsSplits ? "new_window" : kUnchecked;
    case OpKind::tensorRegister:
    case OpKind::tensorDeregister: return kUnchecked;
    case OpKind::put:
    case OpKind::signal:
    case OpKind::waitSignal: return name(call.op.kind);
    case OpKind::shrink:
    case OpKind::registerMemory:
    case OpKind::suspend:
    case OpKind::resume:
    case OpKind::initialization: break;  // not launched through here
  }
  TORCH_INTERNAL_ASSERT(false, "the recorder does not know ", name(call.op.kind));
}

}  // namespace

void RecorderSet::describe(Group& group, std::string description) {
  std::lock_guard lock(mutex_);
  group.description = std::move(description);
}

bool RecorderSet::add(std::shared_ptr<Recorder> recorder) {
  if (!recorder->enabled()) {
    return false;
  }
  std::lock_guard lock(mutex_);
  auto all = std::make_shared<std::vector<Recorded>>();
  if (const auto now = std::atomic_load(&recorders_)) {
    *all = *now;
  }
  const auto same = [&](const Recorded& recorded) { return recorded.recorder == recorder; };
  if (std::any_of(all->begin(), all->end(), same)) {
    return false;
  }
  const auto& known = comm_.group();
  auto* const group =
      recorder->addGroup(known.name, known.description, comm_.globalRanks(), comm_.rank());
  recorder->setLibraryVersion(versionText(comm_.libraryVersion()));
  all->push_back({std::move(recorder), group});
  std::atomic_store(&recorders_, std::shared_ptr<const std::vector<Recorded>>(std::move(all)));
  any_.store(true, std::memory_order_release);
  return true;
}

void RecorderSet::remove(const Recorder* recorder) {
  std::lock_guard lock(mutex_);
  const auto now = std::atomic_load(&recorders_);
  if (!now) {
    return;
  }
  auto rest = std::make_shared<std::vector<Recorded>>(*now);
  std::erase_if(
      *rest, [&](const Recorded& recorded) { return recorded.recorder.get() == recorder; });
  any_.store(!rest->empty(), std::memory_order_release);
  std::atomic_store(&recorders_, std::shared_ptr<const std::vector<Recorded>>(std::move(rest)));
}

void RecorderSet::record(PreparedOp& call) {
  auto recorders = std::atomic_load(&recorders_);
  const auto& op = call.op;
  if (recorders->empty()) {
    return;  // removed just now
  }
  const auto* const what = recordedName(call);
  auto* const source = StackSource::get();
  auto recording = std::make_shared<Recording>(
      std::move(recorders), source == nullptr ? nullptr : source->capture());
  // Whether what is in an accelerator's stream has started is not known.
  const bool started = !op.async && comm_.device().is_cpu() && comm_.library().ready();
  const auto addMessage = [&](const PreparedOp& message, uint64_t seq) {
    const bool sends = message.op.kind == OpKind::send;
    recording->add(
        {.seq = seq,
         .inputs = message.inputs,
         .outputs = message.outputs,
         .timeout = op.timeout,
         .direction = sends ? Record::Direction::send : Record::Direction::receive,
         .peer = message.op.peer,
         .started = started});
  };
  if (call.message) {
    addMessage(call, op.seq);
  } else if (!call.parts.empty()) {
    for (size_t i = 0; i < call.parts.size(); ++i) {
      addMessage(call.parts[i], op.seq + i);
    }
  } else {
    const bool oneSided = isPointToPoint(op.kind);
    recording->add(
        {.op = what,
         .seq = op.seq,
         .inputs = call.inputs,
         .outputs = call.outputs,
         // The analyser looks at the first tensor alone, where it looks at sizes.
         .join = op.kind != OpKind::coalesced && what != kUnchecked,
         .timeout = op.timeout,
         .direction = oneSided ? Record::Direction::one : Record::Direction::none,
         .peer = oneSided ? op.peer : -1,
         .started = started});
  }
  call.op.recording = std::move(recording);
}

void RecorderSet::inherit(const RecorderSet& former) {
  if (const auto recorders = std::atomic_load(&former.recorders_)) {
    for (const auto& recorded : *recorders) {
      add(recorded.recorder);
    }
  }
}

void RecorderSet::dump() {
  const auto recorder = process_recorder::get();
  const auto recorders = std::atomic_load(&recorders_);
  if (!recorder || !recorders ||
      std::none_of(recorders->begin(), recorders->end(), [&](const Recorded& recorded) {
        return recorded.recorder == recorder;
      })) {
    return;
  }
  // A second caller waits for the first dump, which has a time limit.
  std::call_once(dumped_, [this] {
    comm_.inquiring().askForDumps();
    process_recorder::dumpAfterFailure();
  });
}

}  // namespace torchcomms_pg
