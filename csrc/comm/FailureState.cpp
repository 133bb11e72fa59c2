#include "comm/FailureState.hpp"

#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Thread.hpp"
#include "comm/DeferredOps.hpp"
#include "comm/GroupHooks.hpp"
#include "comm/Identity.hpp"
#include "comm/InFlightOps.hpp"
#include "comm/Observer.hpp"
#include "comm/RecorderSet.hpp"
#include "handle/CommHandle.hpp"
#include "hooks/HookCall.hpp"
#include "host/Interrupt.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printable.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

// Limit of the time for which hooks delay the error, for example to write a dump.
constexpr std::chrono::seconds kHookPatience{30};

// Limit of the time for which an ending process waits for the other ranks' dumps: a launcher ends
// the other processes when the first has ended.
constexpr Milliseconds kDumpPatience{1500};

// Limits of the wait for pending output, by an ending process, and by a thread that is about to
// raise.
constexpr Milliseconds kLastWords{1000};
constexpr Milliseconds kPrinting{100};

// True while this thread calls abort hooks. The hooks may call functions that wait for abort hooks.
thread_local bool inAbortHook = false;

// Describes an operation as ProcessGroupNCCL does.
std::string describeAsNccl(const Operation& op) {
  return "WorkNCCL(SeqNum=" + std::to_string(op.seq) +
         ", OpType=" + c10d::opTypeToString(traits(op.kind).type) +
         ", NumelIn=" + std::to_string(op.numelIn) + ", NumelOut=" + std::to_string(op.numelOut) +
         ", Timeout(ms)=" + std::to_string(op.timeout.count()) + ")";
}

// Sets the failure of `op`. If it is the first, prints ProcessGroupNCCL's line besides the verdict:
// readers of the logs of jobs on accelerators look for it. On the CPU the line would only repeat
// the exception, so it is logged as information, which TORCH_CPP_LOG_LEVEL=INFO shows. Gloo has no
// such line.
std::shared_ptr<const Failure> setPrinted(
    FailureState& state, const Identity& self, const Operation& op, Failure failure) {
  const auto message = printable(failure.message);
  const auto first = state.set(std::move(failure));
  if (first->message != message || self.group().standsForGloo()) {
    return first;  // an earlier failure is kept, and was printed
  }
  const auto ran = std::chrono::duration_cast<Milliseconds>(Clock::now() - op.issued);
  const auto line =
      "[Rank " + std::to_string(self.rank()) + "] " +
      (first->type == c10d::ErrorType::TIMEOUT
           ? "Watchdog caught collective operation timeout: " + describeAsNccl(op) + " ran for " +
                 std::to_string(ran.count()) + " milliseconds before timing out."
           : "Collective " + describeAsNccl(op) +
                 " raised the following async exception: " + message);
  if (self.queues()) {
    printLine(line);
  } else {
    LOG(INFO) << line;
  }
  return first;
}

// Builds the failure of a group that a call on this rank has ended. `how`: "aborted" or the like.
Failure requested(const Identity& self, const std::string& how, const std::string& why) {
  const auto& group = self.group();
  return {
      .message =
          "group '" + group.name + "' was " + how + " on rank " + group.numberOf(self.rank()) + why,
      .group = group.name,
      .ranks = {self.rank()}};
}

// Ends the process without destructors: other threads are blocked in operations.
[[noreturn]] void endProcess(const std::string& why) {
  printLine(
      "torchcomms_pg ends this process: " + why +
      "\n(TORCHCOMM_ABORT_ON_ERROR=false raises CommError instead, and so does "
      "abort_process_on_timeout_or_error=False in pg_options or of new_comm)");
  awaitPrinted(kLastWords);
  ProcessObserver::get().beforeExit();
  _exit(1);
}

}  // namespace

std::shared_ptr<const Failure> FailureState::set(Failure failure, Cause cause) {
  // The texts contain names and paths from other processes, which may be unprintable.
  failure.message = printable(failure.message);
  failure.verdict = printable(failure.verdict);
  const bool ends = cause != Cause::requested && endsProcess();
  const bool end = ends && cause == Cause::met;
  failure.endsProcess = ends && !end;
  auto ours = std::make_shared<const Failure>(std::move(failure));
  // Locked until hooksDone_ is set: once get() returns a failure, awaitHooks() waits for its hooks.
  LockGuard lock(mutex_);
  if (auto known = get()) {
    return known;  // the first failure is kept
  }
  const auto keep = [&] {
    ending_.store(end, std::memory_order_release);
    failure_.store(ours);
    if (cause != Cause::requested) {
      inFlight_.totals().noteFailure();
    }
  };
  const auto unfinished = ExitGuard::begin();
  if (!unfinished) {  // hooks and dumps need the interpreter, which is ending
    keep();
    if (end) {
      endProcess(ours->message);
    }
    return ours;
  }
  auto table = hooks_.users()->table();
  auto first = hooks_.failed();
  const bool tells = cause != Cause::requested;
  const bool dump = tells && recorders_.any();
  if (first || !table->abort.empty() || tells) {
    // Hooks may need the GIL and take time, and so may their destructors. The thread that found the
    // failure must wait for neither. The thread is started first: if memory is too short for it, no
    // failure is set that nobody tells, and the caller tries again.
    const auto done = std::make_shared<std::promise<void>>();
    Monitor::get().runDetached([unfinished, this, alive = self_.keepAlive(),
                                first = std::move(first), table = std::move(table), end, dump,
                                tells, ours, done] {
      {
        inAbortHook = true;
        // The thread may run other bodies.
        const auto outside = c10::make_scope_exit([] { inAbortHook = false; });
        {
          const LockGuard set(mutex_);  // get() returns `ours` from now on
        }
        if (tells) {
          attempt([&] { observer_.failed(*ours); });
        }
        if (dump) {
          attempt([&] { recorders_.dump(observer_); });
        }
        if (first) {
          attempt(*first);
        }
        for (const auto& [id, hook] : table->abort) {
          attempt([&, &hook = *hook] { callHook("an abort hook", hook); });
        }
        if (dump && endsProcess()) {
          attempt([&] { observer_.awaitDumps(end ? kDumpPatience : Milliseconds(0)); });
        }
        if (end) {
          attempt([&] { endProcess(ours->message); });
          _exit(1);  // the last words did not fit into memory
        }
      }
      done->set_value();
    });
    hooksDone_ = done->get_future();
  }
  keep();
  return ours;
}

void FailureState::awaitHooks() const {
  if (inAbortHook) {
    return;
  }
  std::shared_future<void> done;
  {
    LockGuard lock(mutex_);
    done = hooksDone_;
  }
  if (done.valid()) {
    done.wait_for(kHookPatience);
  }
  awaitPrinted(kPrinting);  // the verdict appears before the program prints the error
}

void FailureState::failLibrary(const Failure& failure) {
  if (ending_.load(std::memory_order_acquire) && self_.queues()) {
    return;
  }
  deferred_.wake();
  library_.fail(failure, self_.keepAlive());
}

Failure FailureState::describe(
    c10d::ErrorType type, const Operation& op, const std::string& what) const {
  const auto& group = self_.group();
  return {
      .type = type,
      .message = torchcomms_pg::describe(op) + " of group '" + group.name + "' on rank " +
                 group.numberOf(self_.rank()) + ": " + what,
      .op = name(op.kind),
      .seq = op.seq,
      .group = group.name};
}

Failure FailureState::endOf(const Operation& op, Failure failure) const {
  if (failure.op.empty()) {  // an abort: adds the operation that it hit
    failure.op = name(op.kind);
    failure.seq = op.seq;
  } else if (failure.op != name(op.kind) || failure.seq != op.seq) {
    failure.message =
        describe(failure.type, op, "the group has failed: " + failure.message).message;
  }
  return failure;
}

std::string FailureState::ofGraphs() const {
  return library_.captured() && !library_.api().has(Feature::fail)
             ? "; operations of the group are in CUDA graphs, a replay of which may wait for "
               "ever: drop these graphs"
             : "";
}

std::exception_ptr FailureState::error(const Operation& op, ncclResult_t result) {
  told_.store(true, std::memory_order_relaxed);
  if (const auto known = get()) {
    meet(*known);
    return std::make_exception_ptr(CommError(endOf(op, *known)));
  }
  const auto report = library_.report();
  std::string why = report.what();
  if (why.empty()) {
    why = library_.closed() ? "it had not ended when the group ended"
                            : library_.api().getErrorString(result);
  }
  auto failure = describe(
      result == ncclRemoteError ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR, op,
      why);
  if (result == ncclRemoteError) {
    failure.ranks = report.ranks;
    failure.message += observer_.leftWords(report.ranks);
  }
  if (report.result == ncclSuccess || report.result == ncclInProgress) {
    return std::make_exception_ptr(CommError(std::move(failure)));  // only this call has failed
  }
  failure.message += ofGraphs();
  if (const auto found = observer_.onFailure(op, result, why)) {
    found->addTo(failure);
  }
  const auto first = setPrinted(*this, self_, op, std::move(failure));
  meet(*first);
  return std::make_exception_ptr(CommError(endOf(op, *first)));
}

std::exception_ptr FailureState::asyncError(const Operation& op) {
  if (get()) {
    return error(op, ncclRemoteError);
  }
  const auto state = library_.state();
  return state == ncclSuccess || state == ncclInProgress ? nullptr : error(op, state);
}

void FailureState::meet(const Failure& failure) const {
  if ((failure.endsProcess || ending_.load(std::memory_order_acquire)) && !inAbortHook) {
    awaitHooks();  // the hooks' thread writes the dumps, and may end the process itself
    endProcess(failure.message);
  }
}

void FailureState::raise(const Failure& failure) const {
  meet(failure);
  told_.store(true, std::memory_order_relaxed);
  throw CommError(failure);
}

Failure FailureState::elsewhere() const {
  const auto report = library_.report();
  // Without a failure, libnccl's last error may be from any other call (CommHandle::report).
  const bool failed = report.result != ncclSuccess && report.result != ncclInProgress;
  const auto& group = self_.group();
  return {
      .type = c10d::ErrorType::REMOTE_ERROR,
      .message = "group '" + group.name + "' has failed while rank " +
                 group.numberOf(self_.rank()) + " was in no operation of it" + ofGraphs() + ": " +
                 (failed ? report.what() : ""),
      .group = group.name,
      .ranks = report.ranks};
}

void FailureState::timeOut(const Operation& op, Milliseconds timeout, const Explanation& found) {
  // Programs search for Gloo's text.
  const bool gloo = self_.group().standsForGloo();
  auto text = (gloo ? "Timed out waiting " : "timed out after ") + inSeconds(timeout) + ": ";
  auto ranks = found.ranks;
  if (!library_.ready()) {
    ranks = ranks.empty() ? library_.missingRanks() : ranks;
    text += ranks.empty() ? std::string("the group was still being set up")
                          : self_.group().rankNames(ranks) + " did not join the group";
  } else if (!found.summary.empty()) {
    text += found.summary;
  } else if (!library_.api().has(Feature::missingRanks)) {
    text +=
        "it has not finished, nor perhaps what is queued before it; NCCL does not tell which "
        "ranks it waits for";
  } else if (const auto absent = library_.missingRanks(); absent.empty()) {
    text += "it has not finished, and nobody knows who is late";
  } else if (library_.absenceIsCertain()) {
    ranks = absent;
    text += self_.group().rankNames(absent) +
            (op.kind == OpKind::waitSignal ? " sent no signal" : " did not arrive");
  } else {
    text += "it has not finished; here it waits for " + self_.group().rankNames(absent) +
            ", and nobody knows who is late";
  }
  auto failure = describe(c10d::ErrorType::TIMEOUT, op, text + ofGraphs());
  failure.ranks = std::move(ranks);
  failure.verdict = found.verdict;
  failure.parting = found.parting;
  failBoth([&] {
    auto told = *setPrinted(*this, self_, op, std::move(failure));
    told.message = "rank " + self_.group().numberOf(self_.rank()) + " gave up: " + told.message;
    failLibrary(told);
  });
}

void FailureState::lose(
    const Operation& op, const std::vector<int>& ranks, const std::vector<int>& pids) {
  auto failure = describe(
      c10d::ErrorType::REMOTE_ERROR, op,
      self_.group().rankNames(ranks) + (pids.size() == 1 ? " (pid " : " (pids ") + joinRanks(pids) +
          ") died" + ofGraphs());
  failure.ranks = ranks;
  failBoth([&] { failLibrary(*setPrinted(*this, self_, op, std::move(failure))); });
}

void FailureState::failBy(const std::string& why) {
  failBoth([&] {
    failLibrary(*set(requested(self_, "aborted", " by " + why + ofGraphs()), Cause::requested));
  });
}

void FailureState::abort(const std::string& why) {
  failBy(why);
  awaitHooks();
}

void FailureState::abortInFlight(const char* why) noexcept {
  try {
    if (inFlight_.size() > 0) {
      failBy(why);
    }
  } catch (...) {
    // Out of memory while describing the failure. The caller limits its waits.
  }
}

void FailureState::shrink() {
  if (inFlight_.size() > 0) {
    // NCCL ends the operations' kernels without reporting an error.
    set(requested(self_, "shrunk", ", which ended its operations"), Cause::requested);
  }
}

std::exception_ptr FailureState::interruption() {
  if (!host::interrupted()) {
    return nullptr;
  }
  failBy(kInterrupt);
  return host::takeInterrupt();
}

}  // namespace torchcomms_pg
