// The collectives that a thread has issued in a backward pass, and waits for after the pass.
#pragma once

#include <atomic>
#include <memory>

#include "monitor/Arrivals.hpp"

namespace torchcomms_pg {

// The collectives that one thread issues asynchronously in one backward pass. DDP waits for their
// futures after the pass, unseen by this library. The thread is therefore assumed to wait from the
// end of the pass until the last of them ends, if that is before its next collective. Thread-safe.
class BackwardPass {
 public:
  // Records that the calling thread has issued a collective of the group of `log`. Returns the
  // thread's current backward pass, or null if it is in none. Call the pass's end() at the
  // collective's end.
  static std::shared_ptr<BackwardPass> join(const std::shared_ptr<ArrivalLog>& log);
  // Adds up the calling thread's wait after its last pass. Call when the thread goes on.
  static void settle();
  // Forgets the calling thread's last pass, if its waits are seen directly.
  static void forget();

  // Records that a collective of the pass has ended.
  void end();

 private:
  using Clock = ArrivalLog::Clock;

  std::atomic<int> inFlight_{0};
  std::atomic<Clock::rep> passed_{0};  // end of the pass, or 0 before
  std::atomic<Clock::rep> ended_{0};   // end of the latest collective
  std::weak_ptr<ArrivalLog> log_;      // used only by the pass's thread
};

}  // namespace torchcomms_pg
