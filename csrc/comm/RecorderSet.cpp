#include "comm/RecorderSet.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "comm/Identity.hpp"
#include "comm/Observer.hpp"
#include "handle/CommHandle.hpp"
#include "nccl/Library.hpp"
#include "recorder/MessageBatch.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

const char* recordedName(const PreparedOp& call) {
  const auto& known = traits(call.op.kind);
  TORCH_INTERNAL_ASSERT(known.recorded != nullptr, "the recorder does not know ", known.name);
  if (call.members) {
    return traits(call.op.parts).recordedBatch;
  }
  // In uneven lists sizes differ between ranks, which torch's analyser would report as an error.
  return call.uneven() && call.op.kind != OpKind::allToAllSingle ? kUnchecked : known.recorded;
}

}  // namespace

void RecorderSet::describe(Group& group, std::string description) {
  LockGuard lock(mutex_);
  group.description = std::move(description);
}

bool RecorderSet::add(std::shared_ptr<FlightRecorder> recorder) {
  if (!recorder->enabled()) {
    return false;
  }
  LockGuard lock(mutex_);
  auto all = std::make_shared<std::vector<RecorderGroup>>();
  if (const auto now = recorders_.load()) {
    *all = *now;
  }
  if (std::ranges::count(*all, recorder, &RecorderGroup::recorder) > 0) {
    return false;
  }
  const auto& known = self_.group();
  auto* const group = recorder->addGroup(
      known.name, known.description, known.backend, self_.globalRanks(), self_.rank());
  recorder->setLibraryVersion(versionText(library_.api().version()));
  all->push_back({std::move(recorder), group});
  recorders_.store(std::shared_ptr<const std::vector<RecorderGroup>>(std::move(all)));
  any_.store(true, std::memory_order_release);
  return true;
}

void RecorderSet::remove(const FlightRecorder* recorder) {
  LockGuard lock(mutex_);
  const auto now = recorders_.load();
  if (!now) {
    return;
  }
  auto rest = std::make_shared<std::vector<RecorderGroup>>(*now);
  std::erase_if(
      *rest, [&](const RecorderGroup& recorded) { return recorded.recorder.get() == recorder; });
  any_.store(!rest->empty(), std::memory_order_release);
  recorders_.store(std::shared_ptr<const std::vector<RecorderGroup>>(std::move(rest)));
}

void RecorderSet::record(PreparedOp& call) {
  auto recorders = recorders_.load();
  const auto& op = call.op;
  if (recorders->empty()) {
    return;  // the last recorder was removed after any()
  }
  if (op.captured) {
    for (const auto& [recorder, group] : *recorders) {
      recorder->noteCaptured();
    }
    return;
  }
  const auto* const what = recordedName(call);
  auto* const source = StackSource::get();
  auto recording = std::make_shared<RecordedOp>(
      std::move(recorders), source == nullptr ? nullptr : source->capture());
  // If operations are queued, their start is unknown.
  const bool started = !op.async && !self_.queues() && library_.ready();
  const auto messages = call.isMessage() ? std::span<const PreparedOp>(&call, 1) : call.parts;
  const bool batched = !call.parts.empty() || op.batched;
  auto seq = op.seq;
  for (const auto& message : messages) {
    const bool sends = message.op.kind == OpKind::send;
    const auto batch = batched ? op.seq : MessageBatch::first(seq);
    recording->add(
        {.seq = seq++,
         .inputs = message.inputs,
         .outputs = message.outputs,
         .timeout = op.timeout,
         .direction = sends ? OpRecord::Direction::send : OpRecord::Direction::receive,
         .peer = message.op.peer,
         .started = started,
         .details = {.tag = message.op.tag, .batch = batch}});
  }
  if (messages.empty()) {
    const bool oneSided = isPointToPoint(op.kind);
    recording->add(
        {.op = what,
         .seq = op.seq,
         .inputs = call.inputs,
         .outputs = call.outputs,
         // Joins lists, unless sizes are unchecked: the analyser compares only the first tensor.
         .join = op.kind != OpKind::coalesced && what != kUnchecked,
         .timeout = op.timeout,
         .direction = oneSided ? OpRecord::Direction::one : OpRecord::Direction::none,
         .peer = oneSided ? op.peer : -1,
         .started = started,
         .details = {
             .root = hasRoot(op.kind) && !call.members ? op.peer : -1,
             .reduceOp = call.members ? nullptr : op.reduceOp}});
  }
  call.op.recording = std::move(recording);
}

void RecorderSet::inherit(const RecorderSet& former) {
  if (const auto recorders = former.recorders_.load()) {
    for (const auto& recorded : *recorders) {
      add(recorded.recorder);
    }
  }
}

void RecorderSet::dump(Observer& observer) {
  const auto recorder = process_recorder::get();
  const auto recorders = recorders_.load();
  if (!recorder || !recorders ||
      std::ranges::count(*recorders, recorder, &RecorderGroup::recorder) == 0) {
    return;
  }
  // A second caller waits for the first dump, which has a time limit.
  std::call_once(dumped_, [&] {
    observer.askForDumps();
    process_recorder::dumpAfterFailure();
  });
}

}  // namespace torchcomms_pg
