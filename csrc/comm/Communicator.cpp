#include "comm/Communicator.hpp"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/OpenCall.hpp"
#include "comm/ParamComms.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::microseconds kJoinPoll{200};

// Returns the backend's name for users, which is "torchcomms" without a process group.
std::string backendName(const Group& group) {
  return group.backend.empty() ? "torchcomms" : group.backend;
}

}  // namespace

Communicator::Communicator(
    const Library& api,
    CommHandle::Made made,
    int rank,
    int size,
    Group group,
    Milliseconds timeout,
    Place place,
    NcclConfig config)
    : Identity(rank, size, std::move(group), std::move(place)),
      config_(std::move(config)),
      timeoutMs_(timeout.count()),
      issued_(size),
      library_(api, std::move(made), place_.device),
      inFlight_(std::make_shared<GroupTotals>(group_.name, backendName(group_), /*watched=*/false)),
      observer_(
          ProcessObserver::get().observe(
              {*this, library_, inFlight_, issued_, relaxations_, failure_})),
      executor_(makeExecutor(*this, place_.device, place_.highPriority)),
      signalSlots_(api.signals()) {}

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

ncclComm_t Communicator::usable() const {
  library_.process().check(group_.name);
  if (const auto failure = failureState_.get()) {
    failureState_.raise(*failure);
  }
  auto* const comm = library_.get();
  TORCH_CHECK(
      (comm != nullptr || !library_.ready()) && !closed(),
      "group '",
      group_.name,
      "' has been shut down; create a new one");
  return comm;
}

Operation Communicator::initialization() {
  Operation op;
  op.kind = OpKind::initialization;
  return op;
}

bool Communicator::initialized(const Operation& op) {
  if (C10_LIKELY(library_.ready())) {
    return true;
  }
  usable();  // raises a failure that the monitor has found, such as a missed deadline
  const auto result = library_.join();
  if (result != ncclSuccess && result != ncclInProgress) {
    std::rethrow_exception(failureState_.error(op, result));
  }
  return result == ncclSuccess;
}

void Communicator::awaitInitialization(const Operation& op) {
  if (initialized(op)) {
    return;
  }
  const OpenCall open(*this, &op);
  for (auto next = Clock::now() + kInterruptInterval; !initialized(op);) {
    std::this_thread::sleep_for(kJoinPoll);
    if (Clock::now() >= next) {
      next = Clock::now() + kInterruptInterval;
      if (const auto raised = failureState_.interruption()) {
        std::rethrow_exception(raised);
      }
    }
  }
}

void Communicator::awaitRanks(Milliseconds timeout) {
  // Adds an operation in flight, so that the monitor watches its deadline.
  auto op = initialization();
  op.issued = Clock::now();
  op.timeout = timeout;
  const auto entry = inFlight_.add(op);
  const auto removal = c10::make_scope_exit([&] { inFlight_.remove(entry); });
  awaitInitialization(op);
}

ncclComm_t Communicator::handle() {
  awaitInitialization();
  return usable();
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
  usable();
  library_.refuseSuspended(group_.name);
  if (C10_UNLIKELY(hooks()->any())) {
    return hooks()->launch(call, std::move(work), *this);
  }
  return start(call, std::move(work));
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
