// Sums over the operations of a group, for metrics.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "operation/Operation.hpp"

namespace torchcomms_pg {

// How an operation has ended.
struct OpEnd {
  bool completed = false;
  // From the issue to the end. If a thread polls for the end: to when the operation last ran.
  Clock::duration lasted{0};
  bool known = true;  // false if its group ended before the outcome was known
};

// Sums over a group's ended operations, and the number in flight. The group's InFlightOps writes
// them, with its lock held. Readers take no lock, and get numbers of about the same moment.
class GroupTotals {
 public:
  // Sums over the operations of one kind that have ended.
  struct Sums {
    uint64_t operations = 0;
    uint64_t failures = 0;
    uint64_t bytes = 0;
    Clock::duration lasted{0};
    Clock::duration waited{0};
  };

  // `backend`: the backend's name for users.
  GroupTotals(std::string group, std::string backend, bool watched)
      : group_(std::move(group)), backend_(std::move(backend)), watched_(watched) {}

  const std::string& group() const { return group_; }
  const std::string& backend() const { return backend_; }
  bool watched() const { return watched_; }

  // Record what is in flight, and what has ended. The caller serializes the calls.
  void setInFlight(size_t number, Clock::time_point oldest) {
    inFlight_.store(number, std::memory_order_relaxed);
    oldest_.store(oldest.time_since_epoch().count(), std::memory_order_relaxed);
  }
  void end(const Operation& op, const OpEnd& end) {
    auto& kind = kinds_[static_cast<size_t>(op.kind)];
    add(kind.operations, 1);
    add(kind.failures, end.known && !end.completed ? 1 : 0);
    add(kind.bytes, op.bytes);
    add(kind.lasted, end.lasted.count());
  }
  // Adds time for which an operation has blocked a thread of the program. Thread-safe.
  void noteWait(OpKind kind, Clock::duration time) {
    kinds_[static_cast<size_t>(kind)].waited.fetch_add(time.count(), std::memory_order_relaxed);
  }
  // Counts a failure of the group or, if it is watched, a verdict on it. Thread-safe.
  void noteFailure() { failures_.fetch_add(1, std::memory_order_relaxed); }

  Sums sums(OpKind kind) const {
    const auto& of = kinds_[static_cast<size_t>(kind)];
    const auto read = [](const auto& count) { return count.load(std::memory_order_relaxed); };
    return {
        read(of.operations), read(of.failures), read(of.bytes), Clock::duration(read(of.lasted)),
        Clock::duration(read(of.waited))};
  }
  uint64_t inFlight() const { return inFlight_.load(std::memory_order_relaxed); }
  // Returns the time at which the oldest operation in flight was issued; meaningless if none is in
  // flight.
  Clock::time_point oldest() const {
    return Clock::time_point(Clock::duration(oldest_.load(std::memory_order_relaxed)));
  }
  uint64_t failures() const { return failures_.load(std::memory_order_relaxed); }

 private:
  struct Kind {
    std::atomic<uint64_t> operations{0};
    std::atomic<uint64_t> failures{0};
    std::atomic<uint64_t> bytes{0};
    std::atomic<Clock::rep> lasted{0};
    std::atomic<Clock::rep> waited{0};
  };

  // Adds without an atomic instruction, which would take five times as long: only one thread writes
  // at a time.
  template <class T>
  static void add(std::atomic<T>& count, std::type_identity_t<T> more) {
    count.store(count.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  const std::string group_;
  const std::string backend_;
  const bool watched_;
  std::array<Kind, kOpKinds> kinds_;
  std::atomic<uint64_t> inFlight_{0};
  std::atomic<Clock::rep> oldest_{0};
  std::atomic<uint64_t> failures_{0};
};

}  // namespace torchcomms_pg
