// How a communicator fails, and what it says then.
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

#include "comm/Communicator.hpp"
#include "comm/Inquiring.hpp"
#include "device/Unfinished.hpp"
#include "monitor/Printable.hpp"
#include "recorder/DumpPipe.hpp"

namespace torchcomms_pg {

namespace {

// How often the monitor has to have seen nothing in flight.
constexpr int kIdleTicks = 2;

// How long hooks may delay the error they were told of, for example to write
// a dump.
constexpr std::chrono::seconds kHookPatience{30};

// How long a process that ends waits until the other ranks have their dumps: a launcher ends
// them when the first has ended.
constexpr Milliseconds kDumpPatience{1500};

// Whether this thread calls abort hooks. They may call what waits for abort hooks.
thread_local bool inAbortHook = false;

void callAbortHook(const std::function<void()>& hook) {
  try {
    hook();
  } catch (const std::exception& error) {
    TORCH_WARN("an abort hook raised: ", error.what());
  }
}

// Without destructors: other threads are blocked in operations.
[[noreturn]] void endProcess(const std::string& why) {
  const auto text = "torchcomms_pg ends this process: " + why +
                    "\n(TORCHCOMM_ABORT_ON_ERROR=false raises CommError instead, and so does "
                    "abort_process_on_timeout_or_error=False in pg_options or of new_comm)\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
  DumpPipe::removeAtExit();
  _exit(1);
}

}  // namespace

std::shared_ptr<const Failure> Communicator::failure() const {
  return std::atomic_load(&failure_);
}

c10d::ErrorType Communicator::error() const {
  const auto failure = std::atomic_load(&failure_);
  return failure ? failure->type : c10d::ErrorType::SUCCESS;
}

std::shared_ptr<const Failure> Communicator::setFailure(Failure failure, Cause cause) {
  // Names and paths of other processes are in them.
  failure.message = printable(failure.message);
  failure.verdict = printable(failure.verdict);
  const bool ends = cause != Cause::requested && endsProcess();
  const bool end = ends && cause == Cause::met;
  failure.endsProcess = ends && !end;
  std::shared_ptr<const Failure> none;
  auto ours = std::make_shared<const Failure>(std::move(failure));
  if (!std::atomic_compare_exchange_strong(&failure_, &none, ours)) {
    return none;  // the first one, which stands
  }
  std::lock_guard lock(hookMutex_);
  const auto unfinished = Unfinished::begin();
  if (!unfinished) {  // the interpreter ends, which hooks and dumps need
    if (end) {
      endProcess(ours->message);
    }
    return ours;
  }
  const auto table = hooks_->table();
  const bool dump = cause != Cause::requested && recorded_.load(std::memory_order_acquire);
  if (failureHook_ || !table->abort.empty() || end || dump) {
    // Hooks may take the GIL and time; whoever found the failure must not.
    const auto done = std::make_shared<std::promise<void>>();
    failureHookDone_ = done->get_future();
    Monitor::get().runApart([unfinished,
                             self = shared_from_this(),
                             first = failureHook_,
                             table,
                             end,
                             dump,
                             text = ours->message,
                             done] {
      inAbortHook = true;
      if (dump) {
        self->dumpRecords();
      }
      if (first) {
        callAbortHook(first);
      }
      for (const auto& [id, hook] : table->abort) {
        callAbortHook(*hook);
      }
      if (dump && self->endsProcess()) {
        self->inquiring_->awaitDumps(end ? kDumpPatience : Milliseconds(0));
      }
      if (end) {
        endProcess(text);
      }
      inAbortHook = false;  // the thread may have more to do
      done->set_value();
    });
  }
  return ours;
}

void Communicator::awaitFailureHook() const {
  if (inAbortHook) {
    return;
  }
  std::shared_future<void> done;
  {
    std::lock_guard lock(hookMutex_);
    done = failureHookDone_;
  }
  if (done.valid()) {
    done.wait_for(kHookPatience);
  }
}

void Communicator::failLibrary(const Failure& failure) {
  hasten();
  if (api_.fail != nullptr) {
    std::lock_guard lock(commMutex_);
    if (auto* const comm = comm_.load(std::memory_order_acquire)) {
      api_.fail(comm, ncclRemoteError, failure.message, failure.ranks);
    }
    return;
  }
  if (libraryFailed_.exchange(true)) {
    return;
  }
  // NCCL may block until its kernels have let go, whoever asks must not.
  Monitor::get().runApart([unfinished = Unfinished(), self = shared_from_this()] {
    const std::lock_guard failing(self->failMutex_);
    ncclComm_t comm = nullptr;
    {
      const std::lock_guard lock(self->commMutex_);
      comm = self->comm_.load(std::memory_order_acquire);
      if (comm == nullptr && self->joining_ != nullptr) {
        self->joining_->leave();  // a call that waits for ranks cannot be ended
      }
    }
    const auto revoke = self->api_.commRevoke;
    auto state =
        comm == nullptr || revoke == nullptr ? ncclInvalidUsage : revoke(comm, NCCL_REVOKE_DEFAULT);
    bool revoked = state == ncclSuccess;
    // In host memory it goes on in the background; the state afterwards may still be that of the
    // failure.
    const auto patience = Clock::now() + kReleasePatience;
    while (state == ncclInProgress && Clock::now() < patience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      revoked =
          self->api_.commGetAsyncError(comm, &state) == ncclSuccess && state != ncclInProgress;
    }
    if (revoked) {
      comm = nullptr;
    } else {
      std::lock_guard lock(self->commMutex_);
      comm = self->comm_.exchange(nullptr, std::memory_order_acq_rel);
    }
    self->libraryReleased_.store(true, std::memory_order_release);
    if (comm != nullptr) {
      self->registrations_.forget();
      self->api_.commAbort(comm);
    }
  });
}

std::string Communicator::rankNames(const std::vector<int>& ranks) const {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  if (group_.hosts.empty()) {
    names += joinRanks(ranks);
  } else {
    for (const int rank : ranks) {
      names +=
          (rank == ranks.front() ? "" : ", ") + std::to_string(rank) + " on " + group_.hosts[rank];
    }
  }
  bool same = true;
  std::vector<int> global;
  for (const int rank : ranks) {
    if (static_cast<size_t>(rank) < group_.globalRanks.size()) {
      global.push_back(static_cast<int>(group_.globalRanks[rank]));
      same &= global.back() == rank;
    }
  }
  if (!same) {
    names += " (global " + joinRanks(global) + ")";
  }
  return names;
}

Failure Communicator::describeFailure(
    c10d::ErrorType type, const Operation& op, const std::string& what) const {
  return {
      type,
      describe(op) + " of group '" + group_.name + "' on rank " + std::to_string(rank_) + ": " +
          what,
      name(op.kind),
      op.seq,
      group_.name,
      {},
      {}};
}

std::exception_ptr Communicator::resultError(const Operation& op, ncclResult_t result) {
  if (const auto known = std::atomic_load(&failure_)) {
    meet(*known);
    auto failure = *known;
    if (failure.op.empty()) {  // an abort: tell what it hit
      failure.op = name(op.kind);
      failure.seq = op.seq;
    }
    return std::make_exception_ptr(CommError(std::move(failure)));
  }
  std::unique_lock lock(commMutex_);
  auto* const comm = comm_.load(std::memory_order_acquire);
  std::string text = comm != nullptr       ? api_.getLastError(comm)
                     : joining_ != nullptr ? joining_->text()
                                           : "";
  if (text.empty()) {
    text = closed_.load(std::memory_order_acquire) ? "it had not ended when the group ended"
                                                   : api_.getErrorString(result);
  }
  auto failure = describeFailure(
      result == ncclRemoteError ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR,
      op,
      text);
  ncclResult_t state = ncclSuccess;
  if (comm == nullptr && joining_ != nullptr && joining_->done()) {
    state = joining_->result();
  } else if (comm != nullptr) {
    api_.commGetAsyncError(comm, &state);
    if (api_.absentRanks != nullptr && result == ncclRemoteError) {
      failure.ranks = api_.absentRanks(comm);
    }
  }
  lock.unlock();
  if (state == ncclSuccess || state == ncclInProgress) {
    return std::make_exception_ptr(CommError(std::move(failure)));  // this call only
  }
  if (auto verdict = inquiring_->onFailure(op, result, text)) {
    failure.verdict = std::move(verdict->text);
    if (!verdict->ranks.empty()) {
      failure.ranks = std::move(verdict->ranks);
    }
  }
  const auto first = setFailure(std::move(failure));
  meet(*first);
  return std::make_exception_ptr(CommError(*first));
}

void Communicator::meet(const Failure& failure) const {
  if (failure.endsProcess && !inAbortHook) {
    awaitFailureHook();  // it writes the records
    endProcess(failure.message);
  }
}

std::vector<int> Communicator::absentRanks() {
  std::lock_guard lock(commMutex_);
  auto* const comm = comm_.load(std::memory_order_acquire);
  return comm == nullptr || api_.absentRanks == nullptr ? std::vector<int>{}
                                                        : api_.absentRanks(comm);
}

void Communicator::raise(const Failure& failure) const {
  meet(failure);
  told_.store(true, std::memory_order_relaxed);
  throw CommError(failure);
}

Failure Communicator::failureElsewhere() {
  Failure failure;
  failure.type = c10d::ErrorType::REMOTE_ERROR;
  failure.group = group_.name;
  std::string text;
  std::lock_guard lock(commMutex_);
  if (auto* const comm = comm_.load(std::memory_order_acquire)) {
    text = api_.getLastError(comm);
    failure.ranks = api_.absentRanks == nullptr ? std::vector<int>() : api_.absentRanks(comm);
  }
  failure.message = "group '" + group_.name + "' has failed while rank " + std::to_string(rank_) +
                    " was in no operation of it: " + text;
  return failure;
}

void Communicator::timeOut(const Operation& op, Milliseconds timeout, const Verdict& verdict) {
  auto absent = absentRanks();
  const bool certain = absenceIsCertain();
  if (waitsForPeer(op.kind) && op.peer >= 0) {
    absent = {op.peer};
  } else if (!verdict.ranks.empty() || (!certain && verdict.answered == size_)) {
    absent = verdict.ranks;
  }
  // Programs look for the words that Gloo has.
  const bool gloo = group_.backend == "gloo";
  auto text = (gloo ? "Timed out waiting " : "timed out after ") + inSeconds(timeout) + ": ";
  if (!initialized_.load(std::memory_order_acquire)) {
    text += absent.empty() ? std::string("the group was still being set up")
                           : rankNames(absent) + " did not join the group";
  } else if (absent.empty() && api_.absentRanks == nullptr) {
    text +=
        "it has not finished, nor perhaps what is queued before it; NCCL does not tell which "
        "ranks it waits for";
  } else if (!certain && verdict.ranks.empty() && verdict.answered < size_) {
    text += "it has not finished" +
            (absent.empty() ? "" : "; here it waits for " + rankNames(absent)) +
            ", and nobody knows who is late";
    absent.clear();
  } else if (absent.empty()) {
    text += "all ranks have arrived, and the operation has not finished";
  } else if (verdict.disagree) {
    text += "the ranks call different operations";
  } else {
    const auto& silent = verdict.silent;
    std::vector<int> late;
    std::copy_if(absent.begin(), absent.end(), std::back_inserter(late), [&silent](int rank) {
      return std::find(silent.begin(), silent.end(), rank) == silent.end();
    });
    if (!late.empty()) {
      text +=
          rankNames(late) + (op.kind == OpKind::waitSignal ? " sent no signal" : " did not arrive");
    }
    if (!silent.empty()) {
      text += (late.empty() ? "" : ", ") + rankNames(silent) + " did not answer";
    }
  }
  auto failure = describeFailure(c10d::ErrorType::TIMEOUT, op, text);
  failure.ranks = std::move(absent);
  failure.verdict = verdict.text;
  const auto first = setFailure(std::move(failure));
  auto told = *first;
  told.message = "rank " + std::to_string(rank_) + " gave up: " + told.message;
  failLibrary(told);
}

bool Communicator::absenceIsCertain() {
  std::lock_guard lock(commMutex_);
  auto* const comm = comm_.load(std::memory_order_acquire);
  return comm == nullptr || api_.mayHaveCome == nullptr || !api_.mayHaveCome(comm);
}

bool Communicator::libraryFailed() {
  std::lock_guard lock(commMutex_);
  auto* const comm = comm_.load(std::memory_order_acquire);
  ncclResult_t state = ncclSuccess;
  return comm != nullptr && api_.commGetAsyncError(comm, &state) == ncclSuccess &&
         state != ncclSuccess && state != ncclInProgress;
}

std::string Communicator::failureMessage() const {
  const auto failure = std::atomic_load(&failure_);
  return failure && !closed_.load(std::memory_order_acquire) ? failure->text() : "";
}

void Communicator::check(Clock::time_point now) noexcept {
  try {
    std::optional<Operation> overdue;
    std::optional<Operation> first;
    bool idle = false;
    {
      std::lock_guard lock(inFlightMutex_);
      idle = inFlight_.empty();
      if (accelerator_ != nullptr && !inFlight_.empty()) {
        first = *inFlight_.front().op;
      }
      for (const auto& entry : inFlight_) {
        const bool ended = entry.flight && entry.flight->asked();  // it is being finished
        if (!ended && now - entry.op->issued >= entry.op->timeout) {
          overdue = *entry.op;
          break;
        }
      }
    }
    if (!idle) {
      hasten();
    }
    inquiring_->answer(now);
    if (failure()) {
      return;
    }
    if (first && initialized_.load(std::memory_order_acquire) && libraryFailed()) {
      inquiring_->explainFailure(*first);
      return;
    }
    inquiring_->checkDeadline(overdue, now);
    // A rank that is late learns of it here, once it is clear that it is: an operation in flight
    // tells more, and sees it at the same time.
    idleTicks_ = idle ? idleTicks_ + 1 : 0;
    if (idleTicks_ > kIdleTicks && !closed_.load(std::memory_order_acquire)) {
      if (libraryFailed()) {
        inquiring_->learnOfFailure();
      } else {
        inquiring_->learnOfVerdict();
      }
    }
  } catch (...) {
    // Out of memory while describing a failure; the next tick tries again.
  }
}

}  // namespace torchcomms_pg
