#include "comm/FailureState.hpp"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/OutstandingTask.hpp"
#include "comm/Communicator.hpp"
#include "comm/DiagnosisClient.hpp"
#include "host/Interrupt.hpp"
#include "monitor/Printable.hpp"
#include "recorder/DumpPipe.hpp"

namespace torchcomms_pg {

namespace {

// Time that hooks may delay the error they were told of, for example to write a dump.
constexpr std::chrono::seconds kHookPatience{30};

// Time that a process that ends waits for the dumps of the other ranks: a launcher ends them when
// the first has ended.
constexpr Milliseconds kDumpPatience{1500};

// True while this thread calls abort hooks. They may call functions that wait for abort hooks.
thread_local bool inAbortHook = false;

void callAbortHook(const std::function<void()>& hook) {
  try {
    hook();
  } catch (const std::exception& error) {
    TORCH_WARN("an abort hook raised: ", error.what());
  }
}

// Ends the process without destructors: other threads are blocked in operations.
[[noreturn]] void endProcess(const std::string& why) {
  const auto text = "torchcomms_pg ends this process: " + why +
                    "\n(TORCHCOMM_ABORT_ON_ERROR=false raises CommError instead, and so does "
                    "abort_process_on_timeout_or_error=False in pg_options or of new_comm)\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
  DumpPipe::removeAtExit();
  _exit(1);
}

}  // namespace

c10d::ErrorType FailureState::type() const {
  const auto failure = get();
  return failure ? failure->type : c10d::ErrorType::SUCCESS;
}

std::shared_ptr<const Failure> FailureState::set(Failure failure, Cause cause) {
  // Names and paths of other processes are in the texts.
  failure.message = printable(failure.message);
  failure.verdict = printable(failure.verdict);
  const bool ends = cause != Cause::requested && endsProcess();
  const bool end = ends && cause == Cause::met;
  failure.endsProcess = ends && !end;
  std::shared_ptr<const Failure> none;
  auto ours = std::make_shared<const Failure>(std::move(failure));
  std::lock_guard lock(mutex_);  // who sees the failure sees its hooks in awaitHooks()
  if (!std::atomic_compare_exchange_strong(&failure_, &none, ours)) {
    return none;  // the first one, which stands
  }
  const auto unfinished = OutstandingTask::begin();
  if (!unfinished) {  // the interpreter ends, which hooks and dumps need
    if (end) {
      endProcess(ours->message);
    }
    return ours;
  }
  const auto table = comm_.hooks()->table();
  const auto first = comm_.groupHooks().failed();
  const bool dump = cause != Cause::requested && comm_.recorders().any();
  if (first || !table->abort.empty() || end || dump) {
    // Hooks may take the GIL and time; the thread that found the failure must not.
    const auto done = std::make_shared<std::promise<void>>();
    hooksDone_ = done->get_future();
    Monitor::get().runApart([unfinished,
                             this,
                             comm = comm_.shared_from_this(),
                             first,
                             table,
                             end,
                             dump,
                             text = ours->message,
                             done] {
      inAbortHook = true;
      if (dump) {
        comm->recorders().dump();
      }
      if (first) {
        callAbortHook(*first);
      }
      for (const auto& [id, hook] : table->abort) {
        callAbortHook(*hook);
      }
      if (dump && endsProcess()) {
        comm->diagnosis().awaitDumps(end ? kDumpPatience : Milliseconds(0));
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

void FailureState::awaitHooks() const {
  if (inAbortHook) {
    return;
  }
  std::shared_future<void> done;
  {
    std::lock_guard lock(mutex_);
    done = hooksDone_;
  }
  if (done.valid()) {
    done.wait_for(kHookPatience);
  }
}

void FailureState::failLibrary(const Failure& failure) {
  comm_.executor().wake();
  comm_.library().fail(failure, comm_.shared_from_this());
}

std::string FailureState::rankNames(const std::vector<int>& ranks) const {
  return comm_.group().rankNames(ranks);
}

Failure FailureState::describe(
    c10d::ErrorType type, const Operation& op, const std::string& what) const {
  return {
      type,
      torchcomms_pg::describe(op) + " of group '" + comm_.group().name + "' on rank " +
          std::to_string(comm_.rank()) + ": " + what,
      name(op.kind),
      op.seq,
      comm_.group().name,
      {},
      {}};
}

std::exception_ptr FailureState::error(const Operation& op, ncclResult_t result) {
  if (const auto known = get()) {
    meet(*known);
    auto failure = *known;
    if (failure.op.empty()) {  // an abort: names the operation that it hit
      failure.op = name(op.kind);
      failure.seq = op.seq;
    }
    return std::make_exception_ptr(CommError(std::move(failure)));
  }
  auto report = comm_.library().report();
  if (report.text.empty()) {
    report.text = comm_.closed() ? "it had not ended when the group ended"
                                 : comm_.api().getErrorString(result);
  }
  auto failure = describe(
      result == ncclRemoteError ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR,
      op,
      report.text);
  if (result == ncclRemoteError) {
    failure.ranks = std::move(report.absent);
  }
  if (report.state == ncclSuccess || report.state == ncclInProgress) {
    return std::make_exception_ptr(CommError(std::move(failure)));  // this call only
  }
  if (auto verdict = comm_.diagnosis().onFailure(op, result, report.text)) {
    failure.verdict = std::move(verdict->text);
    if (!verdict->ranks.empty()) {
      failure.ranks = std::move(verdict->ranks);
    }
  }
  const auto first = set(std::move(failure));
  meet(*first);
  return std::make_exception_ptr(CommError(*first));
}

std::exception_ptr FailureState::asyncError(const Operation& op) {
  if (get()) {
    return error(op, ncclRemoteError);
  }
  const auto state = comm_.library().state();
  return state == ncclSuccess || state == ncclInProgress ? nullptr : error(op, state);
}

void FailureState::meet(const Failure& failure) const {
  if (failure.endsProcess && !inAbortHook) {
    awaitHooks();  // their thread writes the records
    endProcess(failure.message);
  }
}

void FailureState::raise(const Failure& failure) const {
  meet(failure);
  raised_.store(true, std::memory_order_relaxed);
  throw CommError(failure);
}

Failure FailureState::elsewhere() const {
  auto report = comm_.library().report();
  Failure failure;
  failure.type = c10d::ErrorType::REMOTE_ERROR;
  failure.group = comm_.group().name;
  failure.ranks = std::move(report.absent);
  failure.message = "group '" + comm_.group().name + "' has failed while rank " +
                    std::to_string(comm_.rank()) + " was in no operation of it: " + report.text;
  return failure;
}

void FailureState::timeOut(const Operation& op, Milliseconds timeout, const Verdict& verdict) {
  const auto& library = comm_.library();
  auto absent = library.absentRanks();
  const bool certain = library.absenceIsCertain();
  if (waitsForPeer(op.kind) && op.peer >= 0) {
    absent = {op.peer};
  } else if (!verdict.ranks.empty() || (!certain && verdict.answered == comm_.size())) {
    absent = verdict.ranks;
  }
  // Programs look for Gloo's words.
  const bool gloo = comm_.group().backend == "gloo";
  auto text = (gloo ? "Timed out waiting " : "timed out after ") + inSeconds(timeout) + ": ";
  if (!library.ready()) {
    text += absent.empty() ? std::string("the group was still being set up")
                           : rankNames(absent) + " did not join the group";
  } else if (absent.empty() && library.api().absentRanks == nullptr) {
    text +=
        "it has not finished, nor perhaps what is queued before it; NCCL does not tell which "
        "ranks it waits for";
  } else if (!certain && verdict.ranks.empty() && verdict.answered < comm_.size()) {
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
  auto failure = describe(c10d::ErrorType::TIMEOUT, op, text);
  failure.ranks = std::move(absent);
  failure.verdict = verdict.text;
  const auto first = set(std::move(failure));
  auto told = *first;
  told.message = "rank " + std::to_string(comm_.rank()) + " gave up: " + told.message;
  failLibrary(told);
}

void FailureState::failBy(const std::string& why) {
  const auto ours =
      set({c10d::ErrorType::COMM_ERROR,
           "group '" + comm_.group().name + "' was aborted on rank " +
               std::to_string(comm_.rank()) + " by " + why,
           "",
           0,
           comm_.group().name,
           {comm_.rank()},
           {}},
          Cause::requested);
  failLibrary(*ours);
}

void FailureState::abort(const std::string& why) {
  failBy(why);
  awaitHooks();
}

void FailureState::giveUp(const char* why) noexcept {
  try {
    if (!comm_.inFlight().empty()) {
      failBy(why);
    }
  } catch (...) {
    // Out of memory while describing it; the caller does not wait forever.
  }
}

void FailureState::shrink() {
  if (comm_.inFlight().empty()) {
    return;
  }
  // NCCL ends the operations' kernels, and says nothing of it.
  set({c10d::ErrorType::COMM_ERROR,
       "group '" + comm_.group().name + "' was shrunk on rank " + std::to_string(comm_.rank()) +
           ", which ended its operations",
       "",
       0,
       comm_.group().name,
       {comm_.rank()},
       {}},
      Cause::requested);
}

std::exception_ptr FailureState::interruption() {
  if (!host::interrupted()) {
    return nullptr;
  }
  failBy(kInterrupt);
  return host::takeInterrupt();
}

}  // namespace torchcomms_pg
