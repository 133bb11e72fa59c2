#include "comm/Communicator.hpp"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "comm/HostExecutor.hpp"
#include "comm/OpenCall.hpp"
#include "comm/ParamComms.hpp"
#include "comm/StreamExecutor.hpp"

namespace torchcomms_pg {

Communicator::Communicator(
    const Library& api, CommHandle::Made made, int rank, int size, Group group,
    Milliseconds timeout, Place place, NcclConfig config)
    : Identity(rank, size, std::move(group), std::move(place)),
      config_(std::move(config)),
      timeoutMs_(timeout.count()),
      issued_(size),
      library_(api, std::move(made), place_.device),
      inFlight_(
          std::make_shared<GroupTotals>(
              group_.name, group_.backend.empty() ? "torchcomms" : group_.backend,
              /*watched=*/false)),
      observer_(
          ProcessObserver::get().observe(
              {*this, library_, inFlight_, issued_, relaxations_, failure_})),
      executor_(makeExecutor()),
      signalSlots_(api.signals()) {}

std::unique_ptr<Executor> Communicator::makeExecutor() {
  if (queues()) {
    return std::make_unique<StreamExecutor>(
        *this, place_.highPriority, library_, joining_, inFlight_, groupHooks_, failureState_,
        watchdog_);
  }
  return std::make_unique<HostExecutor>(
      library_, joining_, inFlight_, groupHooks_, deferred_, failureState_, watchdog_, *observer_);
}

Communicator::~Communicator() {
  if (!ofThisProcess()) {
    library_.forget();
    return;
  }
  observer_->close();
  // Nothing is in flight: every operation holds a reference to its communicator.
  library_.discard(failureState_.get() != nullptr);
}

void Communicator::setDescription(std::string description) {
  recorders_.describe(group_, std::move(description));
}

PreparedOp Communicator::prepare(OpKind kind, const Options& options) const {
  PreparedOp call;
  call.op.kind = kind;
  call.op.async = options.async;
  call.op.extra = inFlight_.lengthened();
  call.op.timeout =
      std::max(options.timeout.value_or(timeout()) + call.op.extra, relaxations_.left());
  return call;
}

WorkPtr Communicator::newWork(const PreparedOp& call) {
  // The results of a send are the sent tensors, as in ProcessGroupNCCL.
  const auto& results = call.op.kind == OpKind::send ? call.inputs : call.outputs;
  auto work = c10::make_intrusive<Work>(self(), rank_, call.op, call.inputs, results);
  work->setTimed(timed());
  return work;
}

WorkPtr Communicator::finishedWork(
    OpKind kind, std::vector<at::Tensor> outputs, std::optional<uint64_t> seq) {
  PreparedOp call;
  call.op.kind = kind;
  call.op.seq = seq.value_or(sequenceNumber());
  call.outputs = std::move(outputs);
  auto work = newWork(call);
  work->finish(nullptr);
  return work;
}

WorkPtr Communicator::launch(PreparedOp call, WorkPtr work) {
  OpenCall::refuse(*this, name(call.op.kind));
  joining_.usable();
  library_.refuseSuspended(group_.name);
  if (C10_UNLIKELY(hooks()->any())) {
    return startHooked(call, std::move(work));
  }
  return start(call, std::move(work));
}

WorkPtr Communicator::startHooked(PreparedOp& call, WorkPtr work) {
  const HookedCall hooked(*hooks(), call);
  WorkPtr result;
  std::exception_ptr error;
  try {
    hooked.before();
    result = start(call, work);
  } catch (...) {
    error = std::current_exception();
    if (work) {
      work->finish(error);  // a batch's Work, which callers have
    }
  }
  hooked.after(
      result, error, [self = self(), args = hooked.args(), kind = call.op.kind, seq = call.op.seq] {
        return self->finishedWork(kind, args->outputs, seq);
      });
  return result;
}

WorkPtr Communicator::start(PreparedOp& call, WorkPtr work) {
  auto& op = call.op;
  executor_->prepare(op);  // may raise, so before the operation takes a number
  issued_.number(call);
  op.issued = Clock::now();
  if (op.collective) {
    observer_->arrive(op.seq, op.issued);
  }
  if (C10_UNLIKELY(recorders_.any())) {
    recorders_.record(call);
  }
  if (!work && (op.async || timed())) {
    work = newWork(call);
  } else if (work) {
    work->assign(op, call.inputs, call.outputs);
  }
  if (work && op.async && op.collective) {
    work->setObserver(observer_->follow());
  }
  const OpenCall open(*this, &op);
  if (C10_LIKELY(!at::hasCallbacks())) {
    executor_->run(call, work);
  } else if (!call.parts.empty()) {
    recordMessages(*this, call.parts, op.seq);
    executor_->run(call, work);
  } else {
    withParamComms(*this, op, profileName(op), call.inputs, call.outputs, work != nullptr, [&] {
      executor_->run(call, work);
    });
  }
  return work;
}

void Communicator::await(Work& work, Milliseconds timeout, bool onHost) {
  if (!work.done()) {
    TORCH_CHECK(
        ofThisProcess(),
        "wait: this work belongs to the parent process; a forked child cannot use its groups");
    TORCH_CHECK(
        work.launched(),
        "wait: the operation is part of a batch that has not been launched; leave the coalescing "
        "context first");
    OpenCall::refuse(*this, "wait");
  }
  const OpenCall open(*this, &work.operation());
  {
    const auto begun = work.done() ? Clock::time_point{} : Clock::now();
    const auto waited = c10::make_scope_exit([&] {
      if (begun != Clock::time_point{}) {
        inFlight_.totals().noteWait(work.operation().kind, Clock::now() - begun);
      }
    });
    executor_->await(work, timeout, onHost);
  }
  if (work.done() && !work.isSuccess()) {
    failureState_.awaitHooks();
  }
}

std::string Communicator::failureMessage() const {
  const auto failure = failureState_.get();
  return failure && !closed() ? failure->text() : "";
}

}  // namespace torchcomms_pg
