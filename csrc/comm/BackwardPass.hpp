// What a thread has issued in a backward pass, and waits for once that has ended.
#pragma once

#include <atomic>
#include <memory>

#include "monitor/Arrivals.hpp"

namespace torchcomms_pg {

// The collectives that one thread issues asynchronously in one backward pass. DDP waits for their
// futures when the pass has ended, and nobody sees it: so the thread is taken to wait from then
// until the last of them ends, if that is before its next collective. Thread-safe.
class BackwardPass {
 public:
  // Notes that the calling thread has issued one of the group of `log`. Returns its pass, to be
  // told of the end; null: it is in none.
  static std::shared_ptr<BackwardPass> join(const std::shared_ptr<ArrivalLog>& log);
  // Counts what the calling thread has waited after its last pass, as it goes on.
  static void settle();
  // Forgets the last pass of the calling thread: its waits are seen.
  static void forget();

  // Notes that one has ended.
  void end();

 private:
  using Clock = ArrivalLog::Clock;

  std::atomic<int> inFlight_{0};
  std::atomic<Clock::rep> passed_{0};  // end of the pass; 0: it goes on
  std::atomic<Clock::rep> ended_{0};   // end of the latest collective
  std::weak_ptr<ArrivalLog> log_;      // used by its thread alone
};

}  // namespace torchcomms_pg
