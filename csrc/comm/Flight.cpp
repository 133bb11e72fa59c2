#include "comm/Flight.hpp"

#include <c10/core/Event.h>

#include <exception>
#include <utility>

#include "comm/StreamExecutor.hpp"

namespace torchcomms_pg {

Flight::Flight(std::shared_ptr<const void> owner, StreamExecutor& executor, Operation op)
    : owner_(std::move(owner)),
      executor_(executor),
      op_(std::move(op)),
      work_(WorkPtr()),
      started_(Clock::now()) {}

void Flight::attach(const WorkPtr& work, bool kept) {
  LockGuard lock(mutex_);
  work_ = c10::weak_intrusive_ptr<Work>(work);
  kept_ = kept ? work : nullptr;
}

void Flight::depart(
    c10::Stream stream, c10::Stream issuer, EventPtr start, EventPtr end,
    std::shared_ptr<const void> keepAlive) {
  LockGuard lock(mutex_);
  stream_ = stream;
  issuer_ = issuer;
  start_ = std::move(start);
  end_ = std::move(end);
  keepAlive_ = std::move(keepAlive);
}

void Flight::departInGraph(
    c10::Stream stream, c10::Stream issuer, EventPtr end, std::shared_ptr<const void> keepAlive,
    uint64_t capture) {
  depart(stream, issuer, /*start=*/nullptr, std::move(end), std::move(keepAlive));
  capture_ = capture;
  inGraph_.store(true, std::memory_order_release);
}

Flight::~Flight() {
  if (inGraph() && keepAlive_) {
    executor_.leaveGraph(*this, std::move(keepAlive_));
  }
}

void Flight::release(const c10::Stream& waiting) {
  std::shared_ptr<const void> keepAlive;  // freed after the lock is released
  LockGuard lock(mutex_);
  if (issuer_ == waiting) {
    keepAlive.swap(keepAlive_);
  }
}

void Flight::release() {
  std::shared_ptr<const void> keepAlive;  // freed after the lock is released
  WorkPtr kept;
  LockGuard lock(mutex_);
  keepAlive.swap(keepAlive_);
  kept.swap(kept_);
}

bool Flight::reached() const {
  const auto event = end();
  return event && !inGraph() && event->query();
}

bool Flight::ask() noexcept {
  try {
    if (!reached()) {
      return false;
    }
  } catch (...) {
    LockGuard lock(mutex_);
    error_ = std::current_exception();
  }
  asked_.store(true, std::memory_order_release);
  return true;
}

void Flight::ended(std::shared_ptr<Awaited> self) noexcept {
  executor_.finishFromEvent(std::static_pointer_cast<Flight>(std::move(self)));
}

Clock::duration Flight::elapsed() const {
  EventPtr start;
  EventPtr end;
  {
    LockGuard lock(mutex_);
    start = start_;
    end = end_;
  }
  if (!start || !end) {
    return {};
  }
  try {
    const std::chrono::duration<double, std::milli> between(start->elapsedTime(*end));
    return std::chrono::duration_cast<Clock::duration>(between);
  } catch (const std::exception&) {
    return {};  // the device has failed; the operation's error reports it
  }
}

}  // namespace torchcomms_pg
