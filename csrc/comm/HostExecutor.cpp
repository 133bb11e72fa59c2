#include "comm/HostExecutor.hpp"

#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <memory>
#include <span>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "comm/FailureState.hpp"
#include "comm/GroupHooks.hpp"
#include "comm/Joining.hpp"
#include "comm/Observer.hpp"
#include "comm/Watchdog.hpp"
#include "handle/CommHandle.hpp"
#include "host/Interrupt.hpp"
#include "recorder/RecordedOp.hpp"

namespace torchcomms_pg {

namespace {

// Time before a deadline at which a thread stops moving messages itself. While a thread moves
// messages, it may sleep for 100 ms without looking at the time.
constexpr Milliseconds kMovingSlack{200};

}  // namespace

void HostExecutor::prepare(Operation& op) {
  if (op.ordered && op.async) {
    worker_.start();
  }
}

void HostExecutor::run(PreparedOp& call, const WorkPtr& work) {
  if (call.op.async) {
    return call.op.ordered ? runOnWorker(call, work) : runMessages(call, work);
  }
  deferred_.wake();  // has the worker finish deferred collectives, for which this one waits
  const auto entry = inFlight_.add(call.op);
  std::exception_ptr error;
  try {
    if (C10_UNLIKELY(!joining_.initialized(call.op))) {
      joining_.awaitInitialization(call.op);
      if (call.op.recording) {
        call.op.recording->start();
      }
    }
    copyInputs(call.copies);
    const auto result = call.launch(library_.api(), joining_.usable(), nullptr);
    // The communicator that a split makes may go on initializing in the background.
    if (result != ncclSuccess && result != ncclInProgress) {
      error = failureState_.interruption();
      error = error ? error : failureState_.error(call.op, result);
    } else {
      runEpilogue(call.epilogue);
    }
  } catch (...) {
    error = std::current_exception();
  }
  const auto ended = Clock::now();
  const auto lasted = ended - call.op.issued;
  inFlight_.end(entry, {.completed = !error, .lasted = lasted});
  inFlight_.totals().noteWait(call.op.kind, lasted);
  observer_.wait(lasted, call.op.collective);
  if (call.op.recording) {
    call.op.recording->end(!error, lasted, -1);
  }
  if (work) {
    work->setStarted(call.op.issued);
    work->finish(error);
    work->completeFutures();
  }
  hooks_.tellEnd(call.op, work, error, call.op.issued, ended);
  inFlight_.remove(entry);  // before the wait for abort hooks, which may end the group
  if (error) {
    failureState_.awaitHooks();
    std::rethrow_exception(error);
  }
}

// Returns whether only a user of the operation's Work needs to learn of the end. The end may then
// be deferred until a thread waits for the Work.
bool HostExecutor::mayBeDeferred(const Work& work) const {
  return !work.timed() && !work.operation().hooked && !hooks_.end() && !at::hasCallbacks();
}

void HostExecutor::runOnWorker(PreparedOp& call, const WorkPtr& work) {
  const auto entry = inFlight_.add(work->operation(), work);
  auto waker = c10::make_scope_exit([this] { worker_.wake(); });
  try {
    joining_.awaitInitialization(work->operation());
    const auto order = library_.holdOrder();
    auto* const stream = worker_.handle();
    auto* const comm = joining_.usable();
    const bool alone =
        library_.api().has(Feature::deferral) && mayBeDeferred(*work) && inFlight_.size() == 1;
    worker_.defer();  // the tasks that this function queues wake a thread once at most
    if (call.op.recording || work->timed()) {
      const auto start = [work] {
        work->setStarted(Clock::now());
        if (const auto& recording = work->operation().recording) {
          recording->start();
        }
      };
      alone ? start() : host::HostStream::fromHandle(stream)->enqueue(start);
    }
    std::shared_ptr<std::exception_ptr> notCopied;
    if (alone) {
      copyInputs(call.copies);
    } else if (!call.copies.empty()) {
      notCopied = std::make_shared<std::exception_ptr>();
      host::HostStream::fromHandle(stream)->enqueue([notCopied, copies = call.copies] {
        try {
          copyInputs(copies);
        } catch (...) {
          *notCopied = std::current_exception();
        }
      });
    }
    const auto result = call.launch(library_.api(), comm, stream);
    if (result != ncclSuccess) {
      std::rethrow_exception(failureState_.error(call.op, result));
    }
    if (alone && library_.api().published(comm)) {
      // Clears the start: a waiting thread may run the rest at any time, so the duration means
      // nothing.
      waker.release();
      work->setStarted({});
    }
    // Keeps the tensors and buffers of the call, which the stream uses.
    const auto held = std::make_shared<const PreparedOp>(std::move(call));
    host::HostStream::fromHandle(stream)->enqueue([this, work, entry, held, notCopied] {
      std::exception_ptr error;
      try {
        if (notCopied && *notCopied) {
          std::rethrow_exception(*notCopied);
        }
        const auto state = library_.stateAfterLaunch();
        if (state != ncclSuccess) {
          if (host::interrupted()) {
            // The waiting thread raises the handler's exception.
            failureState_.failBy(FailureState::kInterrupt);
          }
          error = failureState_.error(work->operation(), state);
        } else {
          runEpilogue(held->epilogue);
        }
      } catch (...) {
        error = std::current_exception();
      }
      finish(work, entry, error);
    });
  } catch (...) {
    // The caller gets the exception and no Work.
    finish(work, entry, std::current_exception());
    throw;
  }
}

void HostExecutor::finish(
    const WorkPtr& work, InFlightOps::Entry entry, const std::exception_ptr& error) {
  // Removing the entry may drop the last other reference to the Work.
  const auto held = work;  // NOLINT(performance-unnecessary-copy-initialization)
  inFlight_.end(entry, {.completed = !error, .lasted = Clock::now() - held->operation().issued});
  if (const auto& recording = held->operation().recording) {
    recording->end(!error, held->elapsed(), held->source());
  }
  held->finish(error);
  hooks_.tellEnd(held->operation(), held, error, held->started(), held->finished());
  // A future's callbacks may wait for later operations.
  if (!held->hasFuture()) {
    inFlight_.remove(entry);
  } else if (held->operation().ordered) {
    worker_.handOver();
    held->completeFutures();
    inFlight_.remove(entry);
  } else {
    // This thread may end the group next, and must then wait for that report.
    inFlight_.setTeller(entry, {});
    runInCallbackThread([this, held, entry] {
      inFlight_.setTeller(entry, std::this_thread::get_id());
      held->completeFutures();
      inFlight_.remove(entry);
    });
  }
}

bool HostExecutor::awaitUninterrupted(Work& work, std::optional<Clock::time_point> deadline) {
  for (;;) {
    const auto slice = Clock::now() + kInterruptInterval;
    const bool last = deadline && *deadline <= slice;
    const bool ended = work.waitUntil(last ? *deadline : slice);
    if (!ended || !work.isSuccess()) {
      if (const auto raised = failureState_.interruption()) {
        std::rethrow_exception(raised);
      }
    }
    if (ended || last) {
      return ended;
    }
  }
}

// Runs messages that no stream orders: each waits only for its peer.
void HostExecutor::runMessages(PreparedOp& call, const WorkPtr& work) {
  // State shared by the messages of one Work, which the last message to end finishes.
  struct Pending {
    HostExecutor* executor;
    WorkPtr work;  // keeps the communicator, and thereby the executor, alive
    InFlightOps::Entry entry;
    size_t left GUARDED_BY(mutex);
    Mutex mutex{};
    std::exception_ptr error GUARDED_BY(mutex){};

    void end(std::exception_ptr cause, size_t count) {
      std::exception_ptr first;
      {
        LockGuard lock(mutex);
        if (cause && !error) {
          error = std::move(cause);
        }
        left -= count;
        if (left > 0) {
          return;
        }
        first = error;
      }
      executor->finish(work, entry, first);
    }
  };
  struct One {
    ExitGuard unfinished;
    std::shared_ptr<Pending> pending;
    std::function<void()> epilogue;
    std::vector<at::Tensor> buffers;  // memory of what is sent

    static void done(void* context, ncclResult_t result, int peer) noexcept {
      const std::unique_ptr<One> self(static_cast<One*>(context));
      auto& pending = *self->pending;
      std::exception_ptr error;
      try {
        if (result != ncclSuccess) {
          error = pending.executor->failureState_.error(pending.work->operation(), result);
        } else {
          pending.work->setSource(peer);
          runEpilogue(self->epilogue);
        }
      } catch (...) {
        error = std::current_exception();
      }
      pending.end(error, 1);
    }
  };

  const std::span<PreparedOp> calls =
      call.parts.empty() ? std::span<PreparedOp>(&call, 1) : std::span<PreparedOp>(call.parts);
  const auto pending = std::make_shared<Pending>(this, work, InFlightOps::Entry(), calls.size());
  pending->entry = inFlight_.add(work->operation(), work);
  work->setStarted(Clock::now());
  size_t launched = 0;
  try {
    joining_.awaitInitialization(work->operation());
    if (call.op.recording) {
      call.op.recording->start();
    }
    const auto& api = library_.api();
    auto* const comm = joining_.usable();
    const bool deferred = api.has(Feature::deferral) && mayBeDeferred(*work);
    const auto noted = c10::make_scope_exit([&] {
      if (deferred) {
        deferred_.noteMessage();
      }
    });
    for (auto& part : calls) {
      copyInputs(part.copies);
      auto message = std::get<Message>(part.task);
      message.deferred = deferred;
      auto one = std::make_unique<One>(
          One{{}, pending, std::move(part.epilogue), std::move(part.buffers)});
      message.done = One::done;
      message.context = one.get();
      const auto result = api.run(message, comm, nullptr);
      if (result != ncclSuccess) {
        // The first message may wait for connections, and a signal may interrupt this wait.
        const auto raised = failureState_.interruption();
        std::rethrow_exception(raised ? raised : failureState_.error(part.op, result));
      }
      static_cast<void>(one.release());  // done() owns it now
      ++launched;
    }
  } catch (...) {
    pending->end(std::current_exception(), calls.size() - launched);
    throw;
  }
}

void HostExecutor::runInCallbackThread(std::function<void()> body) {
  try {
    callbacks_.start();
  } catch (const std::exception&) {
    body();  // may block this thread, but has to run
    return;
  }
  callbacks_.enqueue([this, body = std::move(body)] {
    callbacks_.handOver();
    body();
  });
}

void HostExecutor::await(Work& work, Milliseconds timeout, bool /*onHost*/) {
  if (work.done()) {
    return;
  }
  const auto waiting = work.waiting();
  observer_.beginWait();
  const auto waited = c10::make_scope_exit([&, from = Clock::now()] {
    observer_.wait(Clock::now() - from, work.operation().collective);
  });
  if (timeout <= kNoTimeout) {
    // Runs queued tasks in this thread only without a timeout, since a task may take longer. A wait
    // for a message runs no tasks: other ranks may do their part of the tasks only after an
    // operation that this thread issues later.
    const auto done = [&work] { return work.done(); };
    if (work.operation().ordered) {
      deferred_.serveMessages();
      worker_.runQueued(done);
    } else if (library_.api().has(Feature::deferral)) {
      library_.api().moveMessages(library_.get(), done);
    } else {
      deferred_.wake();
    }
    awaitUninterrupted(work, std::nullopt);
    return;
  }
  const auto deadline = Clock::now() + timeout;
  if (!work.operation().ordered && library_.api().has(Feature::deferral)) {
    const auto until = deadline - kMovingSlack;
    library_.api().moveMessages(
        library_.get(), [&] { return work.done() || Clock::now() >= until; });
  }
  if (!work.done()) {
    deferred_.wake();
  }
  if (!awaitUninterrupted(work, deadline)) {
    while (const auto more = watchdog_.judge(work.operation(), timeout, deadline)) {
      if (awaitUninterrupted(work, Clock::now() + *more)) {
        break;
      }
    }
    if (!work.waitUntil(Clock::now() + CommHandle::kReleasePatience)) {
      failureState_.awaitHooks();
      throw CommError(*failureState_.get());
    }
  }
}

void HostExecutor::drain(Milliseconds messages) {
  deferred_.wake();
  const auto start = Clock::now();
  std::exception_ptr raised;
  const auto patience = [&] {
    return raised ? Milliseconds(CommHandle::kReleasePatience) : kInterruptInterval;
  };
  while (!inFlight_.awaitNone(patience(), Clock::now() - start >= messages)) {
    if (raised) {
      break;  // the program is interrupted: leaves operations that do not end
    }
    raised = failureState_.interruption();
  }
  if (raised) {
    std::rethrow_exception(raised);
  }
}

}  // namespace torchcomms_pg
