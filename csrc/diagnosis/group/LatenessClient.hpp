// This rank's part in finding the rank of a group that is always late.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/AtomicShared.hpp"
#include "diagnosis/group/BackwardPass.hpp"
#include "diagnosis/lateness/Arrivals.hpp"
#include "diagnosis/lateness/Lateness.hpp"
#include "monitor/MonitorThread.hpp"
#include "operation/Group.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

// Records this rank's arrivals at a group's collectives. While arrivals occur, publishes them in
// the job's store every two seconds, less often in large jobs (publicationInterval). If the warning
// is on, rank 0 reads all ranks' arrivals, judges, and warns. Without a store, or after its loss,
// publishes and judges nothing. Calls of the store run in separate threads, since they may block.
// Thread-safe.
class LatenessClient {
 public:
  // Limit of the wait for the store's answer.
  static constexpr Milliseconds kPatience{4000};

  // Sets whether rank 0 of a group warns. Call before groups are made.
  static void setWarning(bool on);

  LatenessClient() = default;
  ~LatenessClient() { close(); }
  LatenessClient(const LatenessClient&) = delete;
  LatenessClient& operator=(const LatenessClient&) = delete;

  // Begins to record and publish. `place`: the prefix of the group's keys in the store, which no
  // other group has, even one of the same name. Does nothing for a group of one rank.
  void open(
      const c10::intrusive_ptr<c10d::Store>& store, const std::string& place, Group group, int rank,
      int size);
  // Stops, and withdraws what this rank has published. Does not block.
  void close();

  // Functions for the threads that issue operations and wait for them.
  //
  // Records that the calling thread arrives at a collective.
  void arrive(uint64_t seq, Clock::time_point at) {
    BackwardPass::settle();
    if (noting_.load(std::memory_order_acquire)) {
      log_->note(seq, at);
    }
  }
  // Records that the calling thread has issued asynchronously the collective of its last arrive().
  // Returns the pass whose end() is to be called at the collective's end, or null without a pass.
  std::shared_ptr<BackwardPass> follow() const {
    return noting_.load(std::memory_order_acquire) ? BackwardPass::join(log_) : nullptr;
  }
  // Records that the calling thread has waited for other ranks. `collective`: the wait was in a
  // collective of this group.
  void wait(Clock::duration time, bool collective) {
    WaitedTime::add(time);
    if (collective && noting_.load(std::memory_order_acquire)) {
      log_->addWait(time);
    }
  }

  // Starts a publication, and a judgement, if they are due. Does not block.
  void check(Clock::time_point now) noexcept REQUIRES(monitorThread);

  // Returns this rank's last judgement that has ranks, or null; also after close(). Only rank 0
  // judges, and only if the warning is on.
  std::shared_ptr<const Lateness> judged() const;

  // Judges how late each rank is, by what all ranks have published. If they publish nothing any
  // more, since they end the group or have lost the store, returns judged(), if any. The result has
  // no ranks if too little is known yet. Blocks for kPatience at most. Raises std::runtime_error,
  // with the name `operation`, if the store does not answer or this group publishes nothing.
  Lateness ask(const char* operation) const;

 private:
  struct State;

  std::atomic<bool> noting_{false};
  std::shared_ptr<ArrivalLog> log_;    // set before `noting_`
  AtomicShared<State> state_;          // null before open() and after close()
  AtomicShared<const Lateness> last_;  // the last judgement of a closed group, or null
};

}  // namespace torchcomms_pg
