// The collectives that a thread has issued in a backward pass, and waits for after the pass.
#pragma once

#include <atomic>
#include <memory>

#include "comm/Observer.hpp"
#include "diagnosis/lateness/Arrivals.hpp"

namespace torchcomms_pg {

// The collectives that one thread issues asynchronously in one backward pass. DDP waits for their
// futures after the pass, which this library cannot observe. This class therefore assumes that the
// thread waits from the end of the pass until the last of these collectives ends. If one has not
// ended when the thread arrives at its next collective, no wait is counted. Thread-safe.
class BackwardPass final : public EndObserver {
 public:
  // Records that the calling thread has issued a collective of the group of `log`. Returns the
  // thread's current backward pass, or null outside of a backward pass. Call the pass's end() at
  // the collective's end.
  static std::shared_ptr<BackwardPass> join(const std::shared_ptr<ArrivalLog>& log);
  // Counts the calling thread's wait after its last pass. Call when the thread arrives at a
  // collective.
  static void settle();
  // Forgets the calling thread's last pass. Call in Work::wait, which measures the wait.
  static void forget();

  // Records that a collective of the pass has ended.
  void end() override;

 private:
  using Clock = ArrivalLog::Clock;

  std::atomic<int> inFlight_{0};
  std::atomic<Clock::rep> passed_{0};  // time of the end of the pass, or 0 before
  std::atomic<Clock::rep> ended_{0};   // time at which the latest collective ended, or 0
  std::weak_ptr<ArrivalLog> log_;      // used only by the pass's thread
};

}  // namespace torchcomms_pg
