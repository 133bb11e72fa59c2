// Operations on an accelerator: queued in its streams, and watched by their
// events.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <thread>
#include <utility>

#include "comm/Communicator.hpp"
#include "comm/Flight.hpp"
#include "comm/Inquiring.hpp"
#include "comm/Recording.hpp"
#include "comm/TorchCompat.hpp"
#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::microseconds kEndPoll{50};
constexpr int kLooks = 100;

}  // namespace

void Communicator::runOnAccelerator(Call& call, const WorkPtr& work) {
  // A synchronous operation is over, for its caller, when it is in the stream;
  // its end is awaited all the same. It holds no tensors: their memory is
  // used again in the order of that same stream.
  const auto flight = std::make_shared<Flight>(shared_from_this(), call.op);
  if (work) {
    flight->attach(work, /*kept=*/call.op.hooked || std::atomic_load(&endHook_));
  }
  flight->setEntry(enter(flight->operation(), nullptr, flight));
  try {
    awaitInitialization();
    const c10::DeviceGuard onDevice(device());
    const bool timed = timing_.load(std::memory_order_relaxed);
    // As the library has them, streams must have the operations in one order.
    std::lock_guard lock(issueMutex_);
    const auto issuer = accelerator_->currentStream();
    const auto stream = call.op.async ? accelerator_->follow(issuer) : issuer;
    auto start = timed ? accelerator_->record(stream, timed) : nullptr;
    {
      c10::OptionalStreamGuard inStream;
      if (call.op.async) {
        inStream.reset_stream(stream);
      }
      queue(call, AcceleratorDevice::handle(stream));
    }
    auto end = accelerator_->record(stream, timed);
    auto shelf = call.op.async ? std::make_shared<const Call>(std::move(call)) : nullptr;
    flight->depart(stream, issuer, std::move(start), std::move(end), std::move(shelf));
    if (work) {
      work->depart(flight);
    }
    accelerator_->watch().add(stream.id(), flight);
  } catch (...) {
    // The caller gets the exception and no Work.
    const auto error = std::current_exception();
    if (work) {
      work->finish(error);
    }
    land(*flight, error);
    throw;
  }
  const auto& op = flight->operation();
  if (op.kind == OpKind::barrier && !op.async) {
    awaitOnAccelerator(*flight, work.get(), kNoTimeout, /*onHost=*/true);
  }
  if (work && work->hasFuture()) {
    work->announce();  // of a batch: asked for before it was launched
  }
}

// Goes into the graph that the current stream records, and runs with each of
// its replays, which nobody here hears of: so there is nothing to watch or to
// record. The graph keeps the memory, and the order between streams that wait.
void Communicator::runInGraph(Call& call, const WorkPtr& work) {
  const c10::DeviceGuard onDevice(device());
  std::exception_ptr error;
  try {
    awaitInitialization();
    std::lock_guard lock(issueMutex_);
    const auto stream = accelerator_->currentStream();
    queue(call, AcceleratorDevice::handle(stream));
    captured_.store(true, std::memory_order_relaxed);
    if (work) {
      const auto flight = std::make_shared<Flight>(shared_from_this(), call.op);
      flight->departInGraph(stream, accelerator_->record(stream, /*timed=*/false));
      work->depart(flight);
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (work) {
    work->finish(error);
    work->announce();
  }
  tellEnd(call.op, work, error, call.op.issued, call.op.issued);
  if (error) {
    std::rethrow_exception(error);
  }
}

void Communicator::queue(Call& call, cudaStream_t stream) {
  auto* const comm = usable();
  const auto result = call.launch(comm, stream);
  if (result != ncclSuccess) {
    std::rethrow_exception(resultError(call.op, result));
  }
  if (call.after) {
    at::AutoDispatchBelowAutograd guard;
    call.after();
  }
}

std::exception_ptr Communicator::asyncError(const Operation& op) {
  if (failure()) {
    return resultError(op, ncclRemoteError);
  }
  ncclResult_t state = ncclSuccess;
  {
    std::lock_guard lock(commMutex_);
    if (auto* const comm = comm_.load(std::memory_order_acquire)) {
      const auto asked = api_.commGetAsyncError(comm, &state);
      state = asked == ncclSuccess ? state : asked;
    }
  }
  return state == ncclSuccess || state == ncclInProgress ? nullptr : resultError(op, state);
}

void Communicator::conclude(std::shared_ptr<Flight> flight) {
  // Elsewhere: tensors may need the GIL to go, and hooks take their time.
  device_->runApart([this, flight = std::move(flight)] {
    auto error = flight->error();
    if (!error) {
      try {
        error = asyncError(flight->operation());
      } catch (...) {
        error = std::current_exception();
      }
    }
    land(*flight, error);
  });
}

void Communicator::land(Flight& flight, const std::exception_ptr& error) {
  const auto& op = flight.operation();
  leave(flight.entry(), !error);
  const auto elapsed = error ? Clock::duration{} : flight.elapsed();
  if (op.recording) {
    op.recording->end(!error, elapsed, -1);
  }
  const auto work = flight.work();
  flight.release();  // hooks may take long
  if (work) {
    work->finish(error);
  }
  const auto started = flight.started();
  const auto finished = elapsed == Clock::duration{} ? Clock::now() : started + elapsed;
  if (const auto hook = std::atomic_load(&endHook_)) {
    // Of a synchronous operation the caller got no Work.
    (*hook)(op, op.async ? work.get() : nullptr, started, finished);
  }
  tellEnd(op, work, error, started, finished);
  if (work && work->hasFuture()) {
    device_->handOver();  // callbacks may wait for operations that come after this one
    work->announce();
  }
  flight.release();  // of what a future has kept meanwhile
}

bool Communicator::awaitEnd(const Flight& flight, std::optional<Clock::time_point> deadline) {
  for (int i = 0; !flight.asked() && !flight.reached() && !failure(); ++i) {
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

void Communicator::awaitOnAccelerator(
    const Flight& flight, const Work* work, Milliseconds timeout, bool onHost) {
  const auto& op = flight.operation();
  const bool limited = timeout > kNoTimeout;
  if (limited || onHost || op.kind == OpKind::barrier) {
    const auto deadline = limited ? std::optional(Clock::now() + timeout) : std::nullopt;
    auto until = deadline;
    while (!awaitEnd(flight, until)) {
      const auto more = inquiring_->judge(op, timeout, *deadline);
      if (!more) {
        break;
      }
      until = Clock::now() + *more;
    }
  }
  if (work != nullptr && work->done()) {
    return;  // its error, if any, is raised by Work::wait
  }
  // The library is asked, and not the device, which costs time and is forbidden while another
  // thread captures a graph.
  if (const auto error = asyncError(op)) {
    awaitFailureHook();
    std::rethrow_exception(error);
  }
}

void Communicator::awaitInStream(const Work& work) {
  const auto flight = work.flight();
  if (!flight) {
    return;
  }
  const auto current = accelerator_->currentStream();
  if (!flight->inGraph()) {
    if (work.done()) {
      return;
    }
    accelerator_->await(*flight->end(), current);
    flight->release(current);
  } else if (isCapturing(current) || isCapturing(*flight->stream())) {
    accelerator_->await(*flight->end(), current);  // it joins the two streams of the graph
  }
}

}  // namespace torchcomms_pg
