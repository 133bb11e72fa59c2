// This rank's part in finding out which rank of a group is always late.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/BackwardPass.hpp"
#include "monitor/Arrivals.hpp"
#include "monitor/Lateness.hpp"
#include "operation/Group.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

// Notes this rank's arrivals at a group's collectives. While there are any it publishes them in the
// job's store, every two seconds, in larger groups less often; where the warning is on, rank 0
// reads those of all, judges, and warns. Without a store, or once that is gone, it does neither.
// What may block does so in a thread of its own, one at a time. Thread-safe.
class LatenessClient {
 public:
  // Limit of the time that the store may take for an answer.
  static constexpr Milliseconds kPatience{4000};

  // Sets whether rank 0 of a group warns. To be set before groups are made.
  static void setWarning(bool on);

  LatenessClient() = default;
  ~LatenessClient() { close(); }
  LatenessClient(const LatenessClient&) = delete;
  LatenessClient& operator=(const LatenessClient&) = delete;

  // Begins. `place`: of the group in the store, and of no other, also of the same name. A rank
  // alone has no part in it.
  void open(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& place,
      Group group,
      int rank,
      int size);
  // Takes back what it has published. Does not block.
  void close();

  // Functions for the threads that issue operations and wait for them.
  //
  // Notes that the calling thread comes to a collective.
  void arrive(uint64_t seq, Clock::time_point at) {
    BackwardPass::settle();
    if (noting_.load(std::memory_order_acquire)) {
      log_->note(seq, at);
    }
  }
  // Notes that it has issued that asynchronously. Returns whom to tell of the end; null: nobody.
  std::shared_ptr<BackwardPass> follow() const {
    return noting_.load(std::memory_order_acquire) ? BackwardPass::join(log_) : nullptr;
  }
  // Notes that the calling thread has waited for other ranks. `collective`: in one of the group.
  void wait(Clock::duration time, bool collective) {
    WaitedTime::add(time);
    if (collective && noting_.load(std::memory_order_acquire)) {
      log_->addWait(time);
    }
  }

  // Does what is due. For the monitor's thread; does not block.
  void check(Clock::time_point now) noexcept;

  // Returns what this rank has judged last; null: nothing. It judges as rank 0, where that warns.
  std::shared_ptr<const Lateness> judged() const;

  // Returns how late each rank is by what all have published; no ranks: not enough is known yet.
  // Blocks for kPatience at most. Raises std::runtime_error where the store does not answer, and
  // where there is no part in it: `operation` is named.
  Lateness ask(const char* operation) const;

 private:
  struct State;

  std::shared_ptr<State> state() const { return std::atomic_load(&state_); }

  std::atomic<bool> noting_{false};
  std::shared_ptr<ArrivalLog> log_;  // set before `noting_`
  std::shared_ptr<State> state_;     // accessed by std::atomic_load; null: no part in it, or closed
};

}  // namespace torchcomms_pg
