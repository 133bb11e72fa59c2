// Operations on an accelerator: queued in its streams, and watched by their
// events.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <thread>
#include <utility>

#include "comm/Communicator.hpp"
#include "comm/Inquiring.hpp"
#include "device/AcceleratorDevice.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::microseconds kLaunchPoll{50};
constexpr int kLooks = 100;

}  // namespace

void Communicator::runOnAccelerator(Call& call, const WorkPtr& work) {
  // A synchronous operation is over, for its caller, when it is in the stream;
  // the monitor still has to see its end. It holds no tensors: their memory is
  // used again in the order of that same stream.
  const auto watched = work ? work
                            : c10::make_intrusive<Work>(
                                  shared_from_this(),
                                  rank_,
                                  call.op,
                                  std::vector<at::Tensor>(),
                                  std::vector<at::Tensor>());
  const auto entry = enter(watched->operation(), watched);
  try {
    awaitInitialization();
    const c10::DeviceGuard onDevice(device());
    const bool timed = timing_.load(std::memory_order_relaxed);
    // As the library has them, streams must have the operations in one order.
    std::lock_guard lock(issueMutex_);
    const auto stream = call.op.async ? accelerator_->follow() : accelerator_->currentStream();
    watched->setStarted(Clock::now());
    auto start = timed ? accelerator_->record(stream, timed) : nullptr;
    {
      c10::OptionalStreamGuard inStream;
      if (call.op.async) {
        inStream.reset_stream(stream);
      }
      queue(call, AcceleratorDevice::handle(stream));
    }
    auto end = accelerator_->record(stream, timed);
    // Buffers in use belong to the current stream, not to this one.
    auto held = call.op.async ? std::make_shared<const Call>(std::move(call)) : nullptr;
    watched->queued(std::move(start), std::move(end), std::move(held));
  } catch (...) {
    // The caller gets the exception and no Work.
    finish(watched, entry, std::current_exception());
    throw;
  }
  if (watched->operation().kind == OpKind::barrier && !watched->operation().async) {
    awaitOnAccelerator(*watched, kNoTimeout, /*onHost=*/true);
  }
  if (watched->hasFuture()) {
    watched->announce();  // of a batch: asked for before it was launched
  }
}

// Goes into the graph that the current stream records, and runs with each of
// its replays, which nobody here hears of: so there is nothing to watch, to
// record or to wait for. The graph keeps the order and the memory.
void Communicator::runInGraph(Call& call, const WorkPtr& work) {
  const c10::DeviceGuard onDevice(device());
  std::exception_ptr error;
  try {
    awaitInitialization();
    std::lock_guard lock(issueMutex_);
    queue(call, AcceleratorDevice::handle(accelerator_->currentStream()));
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
  const auto result = settle(comm, call.launch(comm, stream));
  if (result != ncclSuccess) {
    std::rethrow_exception(resultError(call.op, result));
  }
  if (call.after) {
    at::AutoDispatchBelowAutograd guard;
    call.after();
  }
}

ncclResult_t Communicator::settle(ncclComm_t comm, ncclResult_t result) {
  // A communicator that does not block launches in the background, and the
  // stream must not be used meanwhile.
  while (result == ncclInProgress) {
    usable();  // raises when the deadline has passed
    std::this_thread::sleep_for(kLaunchPoll);
    const auto asked = api_.commGetAsyncError(comm, &result);
    result = asked == ncclSuccess ? result : asked;
  }
  return result;
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

void Communicator::collectFinished() {
  std::vector<std::pair<WorkPtr, InFlightList::iterator>> ended;
  {
    std::lock_guard lock(inFlightMutex_);
    for (auto entry = inFlight_.begin(); entry != inFlight_.end(); ++entry) {
      if (entry->ending || !entry->work) {
        continue;
      }
      try {
        entry->ending = entry->work->reached();
      } catch (...) {
        entry->ending = true;  // the device has failed; conclude() tells how
      }
      if (entry->ending) {
        ended.emplace_back(entry->work, entry);
      }
    }
  }
  // Elsewhere: tensors may need the GIL to go, and hooks take their time.
  for (auto& [work, entry] : ended) {
    device_->runApart([this, work = std::move(work), entry = entry] { conclude(work, entry); });
  }
}

void Communicator::conclude(const WorkPtr& work, InFlightList::iterator entry) {
  std::exception_ptr error;
  try {
    work->reached();
    error = asyncError(work->operation());
  } catch (...) {
    error = std::current_exception();
  }
  finish(work, entry, error);
}

bool Communicator::awaitEnd(Work& work, std::optional<Clock::time_point> deadline) {
  for (int i = 0; !work.isCompleted() && !failure(); ++i) {
    if (deadline && Clock::now() >= *deadline) {
      return false;
    }
    if (i < kLooks) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kLaunchPoll);
    }
  }
  return true;
}

void Communicator::awaitOnAccelerator(Work& work, Milliseconds timeout, bool onHost) {
  const bool limited = timeout > kNoTimeout;
  if (limited || onHost || work.operation().kind == OpKind::barrier) {
    const auto deadline = limited ? std::optional(Clock::now() + timeout) : std::nullopt;
    auto until = deadline;
    while (!awaitEnd(work, until)) {
      const auto more = inquiring_->judge(work.operation(), timeout, *deadline);
      if (!more) {
        break;
      }
      until = Clock::now() + *more;
    }
  }
  if (work.done()) {
    return;  // its error, if any, is raised by Work::wait
  }
  // Only of an operation that has ended is it known that nothing went wrong;
  // of the others the monitor, or the next operation, tells.
  if (failure() || work.reached()) {
    if (const auto error = asyncError(work.operation())) {
      awaitFailureHook();
      std::rethrow_exception(error);
    }
  }
  awaitInStream(work);
}

void Communicator::awaitInStream(Work& work) {
  if (const auto end = work.end()) {
    accelerator_->await(*end);
  }
  work.release();
}

}  // namespace torchcomms_pg
