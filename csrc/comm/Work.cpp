#include "comm/Work.hpp"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <thread>
#include <utility>

#include "comm/Communicator.hpp"
#include "comm/Flight.hpp"
#include "comm/ParamComms.hpp"
#include "operation/CommError.hpp"

namespace torchcomms_pg {

namespace {

constexpr int kSpins = 50;

c10d::WorkResult workResult(const std::exception_ptr& error) {
  if (!error) {
    return c10d::WorkResult::SUCCESS;
  }
  try {
    std::rethrow_exception(error);
  } catch (const CommError& e) {
    return e.failure().type == c10d::ErrorType::TIMEOUT ? c10d::WorkResult::TIMEOUT
                                                        : c10d::WorkResult::COMM_ERROR;
  } catch (...) {
    return c10d::WorkResult::COMM_ERROR;
  }
}

}  // namespace

Work::Work(
    std::shared_ptr<Communicator> comm, int rank, Operation op, std::vector<at::Tensor> inputs,
    std::vector<at::Tensor> outputs)
    : latest::Work(
          rank, traits(op.kind).type,
          C10_UNLIKELY(at::hasCallbacks())
              ? rangeName(op, comm->group(), rank, !comm->device().is_cpu()).c_str()
              : nullptr,
          // The tensors whose shapes a profile shows.
          C10_UNLIKELY(at::hasCallbacks())
              ? std::optional(op.kind == OpKind::recv ? outputs : inputs)
              : std::nullopt),
      comm_(std::move(comm)),
      made_(std::move(op)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)) {}

std::string Work::text() const {
  return describe(operation()) + " of group '" + comm_->group().name + "' on rank " +
         comm_->group().numberOf(comm_->rank());
}

bool Work::isCompleted() {
  if (done()) {
    return true;
  }
  comm_->deferred().wake();
  const auto flight = this->flight();
  return flight && flight->reached();
}

bool Work::isSuccess() const {
  if (done()) {
    return !exception();
  }
  const auto flight = this->flight();
  return flight && flight->reached() && comm_->failureState().get() == nullptr;
}

int Work::sourceRank() const {
  TORCH_CHECK(
      operation().kind == OpKind::recv, name(operation().kind),
      ": only a receive has a source rank");
  const int rank = source();
  TORCH_CHECK(
      rank >= 0, "recv: the source rank is known when the message has arrived; call wait() first");
  return rank;
}

void Work::blockCurrentStream() {
  comm_->executor().awaitInStream(*this);
}

bool Work::wait(std::chrono::milliseconds timeout) {
  wait(timeout, /*onHost=*/false);
  return true;
}

void Work::wait(std::chrono::milliseconds timeout, bool onHost) {
  withParamComms(
      *comm_, operation(), "wait", {}, {}, true, [&] { comm_->await(*this, timeout, onHost); });
  if (c10d::allow_inflight_collective_as_graph_input()) {
    c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(this));
  }
  std::lock_guard lock(mutex_);
  if (exception_) {
    std::rethrow_exception(exception_);
  }
}

void Work::abort() {
  comm_->failureState().abort("abort() of a work of " + describe(operation()));
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  {
    std::lock_guard lock(mutex_);
    if (!future_) {
      std::vector<c10::Device> devices;  // of the outputs; none for host memory
      if (comm_->queues()) {
        devices.push_back(comm_->device());
      }
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), std::move(devices));
    }
  }
  comm_->deferred().wake();
  completeFutures();
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFutureResult() {
  {
    std::lock_guard lock(mutex_);
    if (!futureResult_) {
      futureResult_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    }
    if (flight_ && !completed_) {
      // The Flight keeps this Work alive to complete the future, even if the caller drops the Work.
      flight_->attach(c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this), true);
    }
  }
  comm_->deferred().wake();
  completeFutures();
  return futureResult_;
}

float Work::getDuration() const {
  using Duration = std::chrono::duration<float, std::milli>;
  // Asks the device, since the operation's end may not have been recorded yet: another thread
  // records it later.
  if (const auto flight = this->flight(); timed_ && !done() && flight && flight->reached()) {
    return Duration(flight->elapsed()).count();
  }
  std::lock_guard lock(mutex_);
  TORCH_CHECK(
      timed_, name(operation().kind),
      ": no duration was taken; call enable_collectives_timing() on the group before the "
      "operation");
  TORCH_CHECK(
      completed_, name(operation().kind),
      ": the duration is known when the operation has finished; call wait() first");
  return Duration(finished_ - started_).count();
}

void Work::assign(Operation op, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs) {
  std::lock_guard lock(mutex_);
  assigned_ = std::move(op);
  op_.store(&*assigned_, std::memory_order_release);
  opType_ = traits(assigned_->kind).type;
  inputs_ = std::move(inputs);
  outputs_ = std::move(outputs);
}

bool Work::waitUntil(std::optional<Clock::time_point> deadline) {
  // Polls first: the end of a short operation is seen sooner by polling than by sleeping.
  for (int i = 0; i < kSpins; ++i) {
    if (isCompleted()) {
      return true;
    }
    std::this_thread::yield();
  }
  std::unique_lock lock(mutex_);
  if (!deadline) {
    cv_.wait(lock, [&] { return completed_; });
    return true;
  }
  return cv_.wait_until(lock, *deadline, [&] { return completed_; });
}

void Work::depart(std::shared_ptr<Flight> flight) {
  std::vector<at::Tensor> inputs;  // freed after the lock is released
  std::lock_guard lock(mutex_);
  if (futureResult_) {  // requested before the batch was launched
    flight->attach(c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this), true);
  }
  flight_ = std::move(flight);
  inputs.swap(inputs_);
}

void Work::release_resources() {
  flight_.reset();  // the Flight's weak reference keeps this object's memory
  inputs_.clear();
  outputs_.clear();
  future_.reset();
  futureResult_.reset();
}

Clock::duration Work::elapsed() const {
  std::lock_guard lock(mutex_);
  return started_ == Clock::time_point{} ? Clock::duration{} : Clock::now() - started_;
}

bool Work::finish(std::exception_ptr error) {
  const auto flight = this->flight();
  const bool asks = flight && !flight->inGraph() && !error;
  // before the lock, since the driver may take time
  const auto elapsed = asks ? flight->elapsed() : Clock::duration{};
  std::vector<at::Tensor> inputs;  // freed after the lock is released
  {
    std::lock_guard lock(mutex_);
    if (completed_) {
      return false;
    }
    finished_ = Clock::now();
    if (flight && !flight->inGraph()) {
      started_ = flight->started();
      finished_ = elapsed == Clock::duration{} ? finished_ : started_ + elapsed;
    }
    exception_ = std::move(error);
    inputs.swap(inputs_);
    // Ends the range before a waiting thread goes on, which might stop the profiler.
    endRange();
    completed_ = true;
    done_.store(true, std::memory_order_release);
  }
  if (const auto observer = std::exchange(observer_, nullptr)) {
    observer->end();
  }
  cv_.notify_all();
  return true;
}

bool Work::hasFuture() const {
  std::lock_guard lock(mutex_);
  return future_ || futureResult_ || recordFunctionEndCallback_;
}

void Work::endRange() {
  if (const auto end = std::exchange(recordFunctionEndCallback_, nullptr)) {
    end();
  }
}

void Work::completeFutures() {
  std::unique_lock lock(mutex_);
  if (!completed_ && !flight_) {
    return;
  }
  endRange();
  // The thread that marks a future as announced completes it, since completion and a late
  // getFuture() may run at the same time.
  const auto future = std::exchange(futureAnnounced_, future_ != nullptr) ? nullptr : future_;
  const bool tell = completed_ && !futureResultAnnounced_;
  const auto futureResult = tell ? futureResult_ : nullptr;
  futureResultAnnounced_ |= futureResult != nullptr;
  const auto error = exception_;
  const auto outputs = outputs_;
  const auto flight = flight_;
  lock.unlock();
  if (futureResult) {
    futureResult->markCompleted(at::IValue(static_cast<uint8_t>(workResult(error))));
  }
  if (future) {
    if (error) {
      future->setError(error);
    } else {
      // The future records the current stream: its callbacks run after everything that is queued in
      // that stream by now. Callbacks therefore run earliest if the future is requested right after
      // the operation.
      c10::OptionalStreamGuard guard;
      if (flight) {
        guard.reset_stream(*flight->stream());
        if (!outputs.empty()) {  // without outputs the future's waiter learns of no stream
          flight->noteFuture();
        }
      }
      future->markCompleted(at::IValue(outputs));
    }
  }
}

}  // namespace torchcomms_pg
