#include "comm/Communicator.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/Inquiring.hpp"
#include "comm/ParamComms.hpp"
#include "comm/Recording.hpp"
#include "comm/TorchCompat.hpp"
#include "device/AcceleratorDevice.hpp"
#include "nccl/Ending.hpp"
#include "shm/Interrupt.hpp"
#include "shm/Process.hpp"

namespace torchcomms_pg {

Communicator::Communicator(
    const NcclApi& api,
    Made made,
    int rank,
    int size,
    Group group,
    Milliseconds timeout,
    std::unique_ptr<Device> device,
    NcclConfig config)
    : api_(api),
      rank_(rank),
      size_(size),
      group_(std::move(group)),
      pid_(getpid()),
      device_(std::move(device)),
      config_(std::move(config)),
      accelerator_(device_->accelerator()),
      timeoutMs_(timeout.count()),
      comm_(made.comm),
      joining_(std::move(made.call)),
      inquiring_(std::make_unique<Inquiring>(*this)),
      registrations_(api) {
  Monitor::get().add(this);
}

Communicator::~Communicator() {
  inquiring_->close();
  // Nothing is in flight: every operation holds a reference to its communicator.
  if (pid_ == getpid()) {
    Monitor::get().remove(this);
  }
  registrations_.forget();
  auto* const comm = comm_.exchange(nullptr);
  if (comm == nullptr) {
    return;
  }
  const auto end = [&api = api_, failed = failure() != nullptr, ofNccl = accelerator_ != nullptr](
                       ncclComm_t ending) {
    return failed   ? api.commAbort(ending)
           : ofNccl ? destroyOrAbort(api, ending)
                    : api.commDestroy(ending);
  };
  if (accelerator_ == nullptr) {
    end(comm);
    return;
  }
  try {
    BlockingCall(api_, device(), [end, comm](ncclComm_t*) { return end(comm); });
  } catch (const std::runtime_error&) {
    end(comm);  // no thread can be started
  }
}

int Communicator::libraryVersion() const {
  int version = 0;
  api_.getVersion(&version);
  return version;
}

std::vector<at::Device> Communicator::futureDevices() const {
  return device().is_cpu() ? std::vector<at::Device>{} : std::vector<at::Device>{device()};
}

void Communicator::setTimeout(Milliseconds timeout) {
  timeoutMs_.store(timeout.count(), std::memory_order_relaxed);
}

Milliseconds Communicator::timeout() const {
  return Milliseconds(timeoutMs_.load(std::memory_order_relaxed));
}

void Communicator::addEphemeralTimeout(Milliseconds extra) {
  extraMs_.fetch_add(extra.count(), std::memory_order_relaxed);
}

void Communicator::setFailureHook(FailureHook hook) {
  std::lock_guard lock(hookMutex_);
  failureHook_ = std::move(hook);
}

void Communicator::setEndHook(EndHook hook) {
  std::atomic_store(&endHook_, hook ? std::make_shared<const EndHook>(std::move(hook)) : nullptr);
}

Communicator::Call Communicator::newCall(OpKind kind, const Options& options) const {
  Call call;
  call.op.kind = kind;
  call.op.async = options.async;
  call.op.extra = Milliseconds(extraMs_.load(std::memory_order_relaxed));
  call.op.timeout =
      std::max(options.timeout.value_or(timeout()) + call.op.extra, inquiring_->relaxed());
  return call;
}

void Communicator::describeTensors(
    Call& call,
    std::vector<at::Tensor> inputs,
    std::vector<at::Tensor> outputs,
    const char* reduceOp) {
  for (const auto& input : inputs) {
    call.op.numelIn += input.numel();
  }
  for (const auto& output : outputs) {
    call.op.numelOut += output.numel();
  }
  call.op.dtype = (inputs.empty() ? outputs : inputs).front().scalar_type();
  call.op.reduceOp = reduceOp;
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
}

WorkPtr Communicator::newWork(const Call& call) {
  auto work =
      c10::make_intrusive<Work>(shared_from_this(), rank_, call.op, call.inputs, call.outputs);
  work->setTimed(timing_.load(std::memory_order_relaxed));
  return work;
}

WorkPtr Communicator::finishedWork(
    OpKind kind, std::vector<at::Tensor> outputs, std::optional<uint64_t> seq) {
  Call call;
  call.op.kind = kind;
  call.op.seq = seq.value_or(sequenceNumber());
  call.outputs = std::move(outputs);
  auto work = newWork(call);
  work->finish(nullptr);
  return work;
}

WorkPtr Communicator::issue(Call call) {
  if (C10_UNLIKELY(openBatches_.load(std::memory_order_relaxed) > 0)) {
    if (auto* batch = openBatch()) {
      batch->calls.push_back(std::move(call));
      return batch->work;
    }
  }
  return launch(std::move(call), nullptr);
}

WorkPtr Communicator::launch(Call call, WorkPtr work) {
  usable();
  refuseSuspended();
  if (C10_UNLIKELY(hooks_->any())) {
    return launchHooked(call, std::move(work));
  }
  return start(call, std::move(work));
}

WorkPtr Communicator::start(Call& call, WorkPtr work) {
  auto& op = call.op;
  if (op.ordered && (op.async || accelerator_ != nullptr)) {
    device_->prepare();  // before the operation counts
  }
  // Ranks that exchange no messages must still agree on the number of collectives.
  auto& counter = isPointToPoint(op.kind) || !call.parts.empty() ? messages_ : collectives_;
  const auto count = std::max<size_t>(call.parts.size(), 1);
  op.seq = counter.fetch_add(count, std::memory_order_relaxed) + 1;
  op.issued = Clock::now();
  const bool captured = accelerator_ != nullptr && isCapturing(accelerator_->currentStream());
  if (C10_UNLIKELY(recorded_.load(std::memory_order_acquire)) && !captured) {
    recordIssue(call);
  }
  if (!work && (op.async || timing_.load(std::memory_order_relaxed))) {
    work = newWork(call);
  } else if (work) {
    work->become(op, call.inputs, call.outputs);
  }
  const auto name = recordName(op.kind);
  withParamComms(*this, op, name, call.inputs, call.outputs, work != nullptr, [&] {
    if (captured) {
      runInGraph(call, work);
    } else if (accelerator_ != nullptr) {
      runOnAccelerator(call, work);
    } else if (!op.async) {
      runHere(call, work);
    } else if (op.ordered) {
      runOnStream(call, work);
    } else {
      runMessages(call, work);
    }
  });
  return work;
}

void Communicator::runHere(Call& call, const WorkPtr& work) {
  hasten();  // it waits for what was issued before
  const auto entry = enter(call.op, nullptr);
  std::exception_ptr error;
  try {
    if (C10_UNLIKELY(!initialized())) {
      awaitInitialization();
      if (call.op.recording) {
        call.op.recording->start();
      }
    }
    auto* const stream = device_->stream(/*async=*/false);
    const auto result = call.launch(usable(), stream);
    // A split or shrunk communicator may go on initializing by itself.
    if (result != ncclSuccess && result != ncclInProgress) {
      error = interruption();
      error = error ? error : resultError(call.op, result);
    } else if (call.after) {
      at::AutoDispatchBelowAutograd guard;
      call.after();
    }
  } catch (...) {
    error = std::current_exception();
  }
  leave(entry, !error);
  const auto ended = Clock::now();
  if (call.op.recording) {
    call.op.recording->end(!error, ended - call.op.issued, -1);
  }
  if (work) {
    work->setStarted(call.op.issued);
    work->finish(error);
    work->announce();
  }
  if (const auto hook = std::atomic_load(&endHook_)) {
    (*hook)(call.op, nullptr, call.op.issued, ended);
  }
  tellEnd(call.op, work, error, call.op.issued, ended);
  if (error) {
    awaitFailureHook();
    std::rethrow_exception(error);
  }
}

// Whether nothing is before the operation, and nobody would learn of its end but by its Work.
bool Communicator::mayBeDeferred(const Operation& op) const {
  if (api_.published == nullptr || timing_.load(std::memory_order_relaxed) || op.hooked ||
      std::atomic_load(&endHook_) || at::hasCallbacks()) {
    return false;
  }
  std::lock_guard lock(inFlightMutex_);
  return inFlight_.size() == 1;
}

void Communicator::runOnStream(Call& call, const WorkPtr& work) {
  const auto entry = enter(work->operation(), work);
  struct Waker {
    Device& device;
    bool wanted = true;
    ~Waker() {
      if (wanted) {
        device.wake();
      }
    }
  } waker{*device_};
  try {
    awaitInitialization();
    // The library takes operations in the order of these calls, and the stream
    // must have them in the same order, or the first would wait behind the
    // second, which waits for the first.
    std::lock_guard lock(issueMutex_);
    auto* const stream = device_->stream(/*async=*/true);
    auto* const comm = usable();
    const bool alone = mayBeDeferred(work->operation());
    device_->defer();  // all of it wakes a thread once, if at all
    if (call.op.recording || timing_.load(std::memory_order_relaxed)) {
      const auto start = [work] {
        work->setStarted(Clock::now());
        if (const auto& recording = work->operation().recording) {
          recording->start();
        }
      };
      alone ? start() : device_->run(stream, start);
    }
    const auto result = call.launch(comm, stream);
    if (result != ncclSuccess) {
      std::rethrow_exception(resultError(call.op, result));
    }
    if (alone && api_.published(comm)) {
      // The rest is run by whoever waits, as late as that is.
      waker.wanted = false;
      work->setStarted({});
    }
    // Holds the whole call: its launch owns the buffers that are in use.
    const auto held = std::make_shared<const Call>(std::move(call));
    device_->run(stream, [this, comm, work, entry, held] {
      std::exception_ptr error;
      try {
        ncclResult_t state = ncclSuccess;
        api_.commGetAsyncError(comm, &state);
        if (state != ncclSuccess) {
          if (shm::interrupted()) {
            failBy(kInterrupt);  // whoever waits raises what the handler has raised
          }
          error = resultError(work->operation(), state);
        } else if (held->after) {
          at::AutoDispatchBelowAutograd guard;
          held->after();
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

void Communicator::finish(
    const WorkPtr& work, InFlightList::iterator entry, const std::exception_ptr& error) {
  const auto held = work;  // leaving may drop the last other reference
  leave(entry, !error);
  if (const auto& recording = held->operation().recording) {
    recording->end(!error, held->elapsed(), held->source());
  }
  held->finish(error);
  if (const auto hook = std::atomic_load(&endHook_)) {
    // Of a synchronous operation the caller got no Work.
    auto* const told = held->operation().async ? held.get() : nullptr;
    (*hook)(held->operation(), told, held->started(), held->finished());
  }
  tellEnd(held->operation(), held, error, held->started(), held->finished());
  if (!held->hasFuture()) {
    return;
  }
  // Callbacks of a future may wait for operations that come after this one.
  if (held->operation().ordered) {
    device_->handOver();
    held->announce();
  } else {
    device_->runApart([held] { held->announce(); });
  }
}

Communicator::InFlightList::iterator Communicator::enter(
    const Operation& op, WorkPtr work, std::shared_ptr<Flight> flight) {
  std::lock_guard lock(inFlightMutex_);
  return inFlight_.insert(inFlight_.end(), InFlight{&op, std::move(work), std::move(flight)});
}

void Communicator::leave(InFlightList::iterator entry, bool completed) {
  InFlightList gone;  // freed after the lock is released
  {
    std::lock_guard lock(inFlightMutex_);
    if (completed) {
      lastCompleted_.noteFrom(*entry->op);
    }
    gone.splice(gone.begin(), inFlight_, entry);
    if (const auto extra = entry->op->extra.count(); extra > 0) {
      // The first to finish ends what was added before it was issued.
      auto current = extraMs_.load(std::memory_order_relaxed);
      extraMs_.store(current >= extra ? current - extra : 0, std::memory_order_relaxed);
    }
    if (!inFlight_.empty()) {
      return;
    }
  }
  drained_.notify_all();
}

void Communicator::await(Work& work, Milliseconds timeout, bool onHost) {
  if (!work.done()) {
    awaitFinish(work, timeout, onHost);
  }
  if (accelerator_ != nullptr) {
    awaitInStream(work);
  }
  if (work.done() && !work.isSuccess()) {
    awaitFailureHook();
  }
}

bool Communicator::awaitUninterrupted(Work& work, std::optional<Clock::time_point> deadline) {
  for (;;) {
    const auto slice = Clock::now() + kInterruptInterval;
    const bool last = deadline && *deadline <= slice;
    const bool ended = work.waitUntil(last ? *deadline : slice);
    if (const auto raised = ended && work.isSuccess() ? nullptr : interruption()) {
      std::rethrow_exception(raised);
    }
    if (ended || last) {
      return ended;
    }
  }
}

void Communicator::awaitFinish(Work& work, Milliseconds timeout, bool onHost) {
  TORCH_CHECK(
      pid_ == static_cast<pid_t>(shm::processId()),
      "wait: this work belongs to the parent process; a forked child cannot use its groups");
  TORCH_CHECK(
      work.launched(),
      "wait: the operation is part of a batch that has not been launched; leave the coalescing "
      "context first");
  if (accelerator_ != nullptr) {
    auto flight = work.flight();
    while (!flight && !work.done()) {  // another thread launches the batch that it belongs to
      std::this_thread::yield();
      flight = work.flight();
    }
    if (!flight) {
      return;
    }
    onHost |= blockingWait_.load(std::memory_order_relaxed);
    awaitOnAccelerator(*flight, &work, timeout, onHost);
    return;
  }
  const Work::Waiting waiting(work);
  if (timeout <= kNoTimeout) {
    // Not with a timeout: what is queued may take longer.
    device_->help([&] { return work.done(); });
    awaitUninterrupted(work, std::nullopt);
    return;
  }
  hasten();
  const auto deadline = Clock::now() + timeout;
  if (!awaitUninterrupted(work, deadline)) {
    while (const auto more = inquiring_->judge(work.operation(), timeout, deadline)) {
      if (awaitUninterrupted(work, Clock::now() + *more)) {
        break;
      }
    }
    if (!work.waitUntil(Clock::now() + kReleasePatience)) {
      awaitFailureHook();
      throw CommError(*failure());
    }
  }
}

}  // namespace torchcomms_pg
