#include "comm/StreamExecutor.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/TorchCompat.hpp"
#include "comm/FailureState.hpp"
#include "comm/GroupHooks.hpp"
#include "comm/Joining.hpp"
#include "comm/Watchdog.hpp"
#include "handle/CommHandle.hpp"
#include "recorder/RecordedOp.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::microseconds kEndPoll{50};
constexpr int kLooks = 100;

}  // namespace

void StreamExecutor::prepare(Operation& op) {
  device_.prepare();
  graphStream_.dropEnded();
  op.captured = isCapturing(device_.currentStream());
}

void StreamExecutor::run(PreparedOp& call, const WorkPtr& work) {
  if (call.op.captured) {
    runInGraph(call, work);
  } else {
    runInStream(call, work);
  }
}

void StreamExecutor::runInStream(PreparedOp& call, const WorkPtr& work) {
  // For its caller, a synchronous operation is over when it is in the stream, but its end is
  // watched. Its Flight keeps no tensors alive: their memory is reused in the order of that same
  // stream.
  const auto flight = std::make_shared<Flight>(self_.keepAlive(), *this, call.op);
  if (work) {
    flight->attach(work, /*kept=*/call.op.hooked || hooks_.end());
  }
  flight->setEntry(inFlight_.add(flight->operation(), nullptr, flight));
  try {
    joining_.awaitInitialization(flight->operation());
    const c10::DeviceGuard onDevice(device_.device());
    const bool timed = work && work->timed();
    const auto order = library_.holdOrder();
    const auto issuer = device_.currentStream();
    const auto stream = call.op.async ? device_.streamAfter(issuer) : issuer;
    auto start = timed ? device_.record(stream, timed) : nullptr;
    {
      c10::OptionalStreamGuard inStream;
      if (call.op.async) {
        inStream.reset_stream(stream);
      }
      queue(call, stream, issuer);
    }
    auto end = device_.record(stream, timed);
    for (const auto& other : call.streams) {
      end->block(other);
    }
    auto keepAlive = call.op.async ? std::make_shared<const PreparedOp>(std::move(call)) : nullptr;
    flight->depart(stream, issuer, std::move(start), std::move(end), std::move(keepAlive));
    if (work) {
      work->depart(flight);
    }
    device_.watch().add(stream.id(), flight);
  } catch (...) {
    // The caller gets the exception and no Work.
    const auto error = std::current_exception();
    if (work) {
      work->finish(error);
    }
    land(*flight, error, /*recorded=*/false);
    throw;
  }
  const auto& op = flight->operation();
  if (op.kind == OpKind::barrier && !op.async) {
    const auto begun = Clock::now();
    awaitStarted(*flight, work.get(), kNoTimeout, /*onHost=*/true);
    inFlight_.totals().noteWait(op.kind, Clock::now() - begun);
  }
  if (work && work->hasFuture()) {
    work->completeFutures();  // a batch's future may be requested before the launch
  }
}

// Captures the operation into the current stream's graph: a synchronous one in that stream, an
// asynchronous one in a branch. Each replay of the graph runs the operation. The host does not
// observe replays, so the operation is neither watched nor recorded. The graph itself orders
// streams that wait for each other, and keeps the memory that was allocated during the capture.
void StreamExecutor::runInGraph(PreparedOp& call, const WorkPtr& work) {
  const c10::DeviceGuard onDevice(device_.device());
  const auto op = call.op;
  std::exception_ptr error;
  try {
    joining_.awaitInitialization(op);
    const auto order = library_.holdOrder();
    const auto issuer = device_.currentStream();
    const auto branch = op.async ? graphStream_.branchFrom(issuer) : std::nullopt;
    const auto stream = branch ? branch->stream : issuer;
    {
      c10::OptionalStreamGuard inStream;
      if (branch) {
        inStream.reset_stream(stream);
      }
      queue(call, stream, issuer);
    }
    library_.noteCaptured();
    for (const auto& other : call.streams) {
      device_.record(stream, /*timed=*/false)->block(other);
    }
    if (work) {
      const auto flight = std::make_shared<Flight>(self_.keepAlive(), *this, op);
      auto end = device_.record(stream, /*timed=*/false);
      auto keepAlive = branch ? std::make_shared<const PreparedOp>(std::move(call)) : nullptr;
      flight->departInGraph(
          stream, issuer, std::move(end), std::move(keepAlive), branch ? branch->capture : 0);
      work->depart(flight);
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (work) {
    work->finish(error);
    work->completeFutures();
  }
  hooks_.users()->tellEnd(op, work.get(), error, op.issued, op.issued);
  if (error) {
    std::rethrow_exception(error);
  }
}

void StreamExecutor::queue(PreparedOp& call, const c10::Stream& stream, const c10::Stream& issuer) {
  auto* const comm = joining_.usable();
  try {
    copyInputs(call.copies);
    const auto result = call.launch(library_.api(), comm, AcceleratorDevice::handle(stream));
    if (result != ncclSuccess) {
      std::rethrow_exception(failureState_.error(call.op, result));
    }
    runEpilogue(call.epilogue);
  } catch (...) {
    joinAfterError(stream, issuer, call.streams);
    throw;
  }
}

// Makes the streams in whose order torch reuses memory wait for the queued kernels. Otherwise
// memory that the exception frees could be reused before the kernels have ended.
void StreamExecutor::joinAfterError(
    const c10::Stream& stream, const c10::Stream& issuer,
    const std::vector<c10::Stream>& others) noexcept {
  if (stream == issuer && others.empty()) {
    return;
  }
  try {
    const auto end = device_.record(stream, /*timed=*/false);
    if (stream != issuer) {
      end->block(issuer);
    }
    for (const auto& other : others) {
      end->block(other);
    }
  } catch (const std::exception&) {
    // The device has failed, and runs nothing more.
  }
}

void StreamExecutor::finishFromEvent(std::shared_ptr<Flight> flight) {
  // recorded in this thread, the poller's, since dumps wait only for that thread
  const bool recorded = recordEnd(*flight);
  // Finishes in another thread: releasing tensors may need the GIL, and hooks may take long.
  device_.finisher().enqueue([this, flight = std::move(flight), recorded] {
    auto error = flight->error();
    if (!error) {
      try {
        error = failureState_.asyncError(flight->operation());
      } catch (...) {
        error = std::current_exception();
      }
    }
    land(*flight, error, recorded);
  });
}

bool StreamExecutor::recordEnd(const Flight& flight) const {
  const auto& recording = flight.operation().recording;
  if (!recording || flight.error() || failureState_.get() || library_.failed()) {
    return false;
  }
  try {
    recording->end(/*completed=*/true, flight.elapsed(), -1);
    return true;
  } catch (const c10::Error&) {
    return false;  // the device has failed meanwhile
  }
}

void StreamExecutor::land(Flight& flight, const std::exception_ptr& error, bool recorded) {
  const auto& op = flight.operation();
  const auto seen = std::max(flight.lastPending() - op.issued, Clock::duration{});
  inFlight_.end(flight.entry(), {.completed = !error, .lasted = seen});
  const auto elapsed = error ? Clock::duration{} : flight.elapsed();
  if (op.recording && !recorded) {
    op.recording->end(!error, elapsed, -1);
  }
  const auto work = flight.work();
  flight.release();  // before the hooks, which may take long
  if (work) {
    work->finish(error);
  }
  const auto started = flight.started();
  const auto finished = elapsed == Clock::duration{} ? Clock::now() : started + elapsed;
  hooks_.tellEnd(op, work, error, started, finished);
  if (work && work->hasFuture()) {
    device_.finisher().handOver();  // callbacks may wait for later operations
    work->completeFutures();
  }
  flight.release();  // drops the Work that getFutureResult() has attached meanwhile
  inFlight_.remove(flight.entry());
}

bool StreamExecutor::awaitEnd(const Flight& flight, std::optional<Clock::time_point> deadline) {
  for (int i = 0; !flight.asked() && !flight.reached() && !failureState_.get(); ++i) {
    if (deadline && Clock::now() >= *deadline) {
      return false;
    }
    if (i < kLooks) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kEndPoll);
    }
  }
  return true;
}

void StreamExecutor::awaitStarted(
    const Flight& flight, const Work* work, Milliseconds timeout, bool onHost) {
  const auto& op = flight.operation();
  const bool limited = timeout > kNoTimeout;
  if (limited || onHost || op.kind == OpKind::barrier) {
    const auto deadline = limited ? std::optional(Clock::now() + timeout) : std::nullopt;
    auto until = deadline;
    while (!awaitEnd(flight, until)) {
      const auto more = watchdog_.judge(op, timeout, *deadline);
      if (!more) {
        break;
      }
      until = Clock::now() + *more;
    }
  }
  if (work != nullptr && work->done()) {
    return;  // Work::wait raises its error, if any
  }
  // Asks the library, not the device: a query of the device would cost time, and is forbidden while
  // another thread captures a graph.
  if (const auto error = failureState_.asyncError(op)) {
    failureState_.awaitHooks();
    std::rethrow_exception(error);
  }
}

void StreamExecutor::await(Work& work, Milliseconds timeout, bool onHost) {
  if (!work.done()) {
    auto flight = work.flight();
    while (!flight && !work.done()) {  // another thread is launching the batch of `work`
      std::this_thread::yield();
      flight = work.flight();
    }
    if (flight) {
      awaitStarted(
          *flight, &work, timeout, onHost || blockingWait_.load(std::memory_order_relaxed));
    }
  }
  awaitInStream(work);
}

void StreamExecutor::awaitInStream(Work& work) {
  const auto flight = work.flight();
  if (!flight) {
    return;
  }
  const auto current = device_.currentStream();
  if (!flight->inGraph()) {
    if (work.done()) {
      return;
    }
    flight->end()->block(current);
    flight->release(current);
  } else if (isCapturing(current) || goesOn(*flight)) {
    flight->end()->block(current);  // joins the two streams of the graph
    flight->release(current);
  }
}

bool StreamExecutor::goesOn(const Flight& flight) const {
  return flight.capture() == 0 ? isCapturing(*flight.stream())
                               : graphStream_.open(flight.capture());
}

void StreamExecutor::leaveGraph(
    const Flight& flight, std::shared_ptr<const void> keepAlive) noexcept {
  try {
    if (!goesOn(flight)) {
      return;
    }
    if (flight.hasFuture()) {
      // The stream of the future's holder will join the operation.
      graphStream_.keep(flight.capture(), std::move(keepAlive));
    } else {
      flight.end()->block(*flight.issuer());
    }
  } catch (const std::exception&) {
    // The capture has been invalidated, and yields no graph.
  }
}

void StreamExecutor::drain(Milliseconds messages) {
  const auto fast = device_.watch().pollFast();
  const auto start = Clock::now();
  std::optional<Clock::time_point> failed;
  while (!inFlight_.awaitNone(kInterruptInterval, Clock::now() - start >= messages)) {
    if (!failed && failureState_.get()) {
      failed = Clock::now();
    }
    // Gives up on a device that does not release a failed operation.
    if (failed && Clock::now() - *failed > CommHandle::kReleasePatience) {
      return;
    }
  }
}

}  // namespace torchcomms_pg
