// Finds out, together with the other ranks of a group, which rank holds the group up. Independent
// of torch.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/Mutex.hpp"
#include "diagnosis/hang/DiagnosisProtocol.hpp"
#include "diagnosis/hang/RunningTime.hpp"

namespace torchcomms_pg {

// One rank's part in the diagnoses of a group: the thread that steps through DiagnosisProtocol, and
// what passes between it and the other threads of this rank.
//
// All calls that may block while a diagnosis goes on are this thread's. So the monitor, and threads
// that wait for a verdict, wait for a bounded time whatever happens to the board. If it fails, the
// verdict says that the cause cannot be known.
//
// Thread-safe.
class HangDiagnosis : public std::enable_shared_from_this<HangDiagnosis> {
 public:
  using Clock = DiagnosisProtocol::Clock;
  using Options = DiagnosisProtocol::Options;
  using Snapshot = DiagnosisProtocol::Snapshot;

  // A longer gap between two looks at the time does not count as waiting.
  static constexpr std::chrono::milliseconds kGap{200};
  // Time limits, in RunningTime: of one step, which waits for the store alone, and of a whole
  // diagnosis. After either, the verdict is that the cause cannot be known.
  static constexpr std::chrono::milliseconds kPatience{4000};
  static constexpr std::chrono::milliseconds kLimit{10000};

  static std::shared_ptr<HangDiagnosis> open(std::unique_ptr<SharedBoard> board, Options options);
  // Does the same without a thread, for any clock: the caller calls step() when due() says.
  static std::shared_ptr<HangDiagnosis> openWithoutThread(
      std::unique_ptr<SharedBoard> board, Options options);
  void close();

  // The functions up to takeRing() are for the monitor's thread; none of them blocks.
  //
  // Asks for a verdict, and returns it once it is found, after at most kLimit. `now`: the time of
  // the call.
  std::optional<Verdict> ask(const DiagnosisRequest& request, Clock::time_point now);
  // Makes this rank look at the board, since another rank may have asked.
  void notice();
  // Returns whether answer() is to be called.
  bool wantsStatus() const { return wantsStatus_.load(std::memory_order_acquire); }
  void answer(Snapshot snapshot);
  // Returns the verdict of a diagnosis that ended with the group's failure, or nullopt if there was
  // no such diagnosis.
  std::optional<Verdict> final() const;
  // Returns the latest standing verdict of a group that goes on, or nullopt if no verdict stands.
  std::optional<DiagnosisProtocol::Standing> standing() const;
  // Returns the verdict of standing(), or one with empty texts if no verdict stands.
  Verdict standingVerdict() const;
  // Ends the standing verdict to which this rank led, if any: all ranks print `text`.
  void end(const std::string& text);
  // Blocks until the ranks can read that the verdict has ended, for at most a second. Not for the
  // monitor's thread.
  void awaitEnd();
  // Returns whether to ring the other ranks; true once for each reason.
  bool takeRing() { return ring_.exchange(false, std::memory_order_acq_rel); }

  // Asks the other ranks to call Options::dump when a ring reaches them. Blocks until the request
  // is on the board, for at most a second. Not for the monitor's thread.
  void askForDumps();

  // Blocks until there is a verdict, at most kLimit. `ended` returns whether the operation has
  // ended meanwhile; may be null. Not for the monitor's thread.
  Verdict await(const DiagnosisRequest& request, const std::function<bool()>& ended);
  // Waits for the verdict of a diagnosis that another rank has begun. Returns nullopt if no rank
  // has begun one.
  std::optional<Verdict> awaitOthers();

  // For the diagnosis's thread.
  //
  // Returns the time of the next step, or nullopt if none is due before the next call of one of the
  // functions above.
  std::optional<Clock::time_point> due(Clock::time_point now) const;
  // Does what is due. May block in the board.
  void step(Clock::time_point now);

 private:
  HangDiagnosis(std::unique_ptr<SharedBoard> board, Options options);
  void run();
  void put(const DiagnosisRequest& request, Clock::time_point now) REQUIRES(mutex_);
  void wake() REQUIRES(mutex_);
  // Returns why to stop waiting for a verdict that was requested at `since`, or "" to wait on.
  std::string tooLong(Clock::duration since, Clock::time_point now) REQUIRES(mutex_);
  bool wanted() const REQUIRES(mutex_);
  std::optional<Clock::time_point> next(Clock::time_point now) const REQUIRES(mutex_);
  DiagnosisProtocol::Wanted take() REQUIRES(mutex_);
  void apply(const DiagnosisProtocol::Outcome& outcome) REQUIRES(mutex_);
  void tell(const DiagnosisProtocol::Outcome& outcome) const;  // prints what a step has led to
  Verdict printUnknown(const std::string& why, const DiagnosisRequest& request) const;

  DiagnosisProtocol protocol_;  // state of the diagnosis's thread
  const Options& options_;
  std::atomic<bool> wantsStatus_{false};
  std::atomic<bool> ring_{false};

  mutable Mutex mutex_;
  std::condition_variable changed_;
  bool running_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
  bool noticed_ GUARDED_BY(mutex_) = false;
  bool dumpsWanted_ GUARDED_BY(mutex_) = false;
  RunningTime clock_ GUARDED_BY(mutex_){kGap};
  // when the current step began; a step may block in the store
  std::optional<Clock::duration> stepping_ GUARDED_BY(mutex_);
  uint64_t looked_ GUARDED_BY(mutex_) = 0;  // number of completed looks for a diagnosis
  std::optional<DiagnosisRequest> asked_ GUARDED_BY(mutex_);
  Clock::duration askedAt_ GUARDED_BY(mutex_){};
  Clock::duration foundAt_ GUARDED_BY(mutex_){};  // when the ranks last found a verdict
  std::optional<Snapshot> snapshot_ GUARDED_BY(mutex_);
  std::optional<Verdict> verdict_ GUARDED_BY(mutex_);
  Wait verdictOn_ GUARDED_BY(mutex_);      // what this rank asked about
  std::string broken_ GUARDED_BY(mutex_);  // reason why the board cannot be used
  // the latest standing verdict
  std::optional<DiagnosisProtocol::Standing> standing_ GUARDED_BY(mutex_);
  Verdict told_ GUARDED_BY(mutex_);                    // see standingVerdict()
  bool led_ GUARDED_BY(mutex_) = false;                // this rank has led to a standing verdict
  std::optional<std::string> end_ GUARDED_BY(mutex_);  // ends that verdict
};

}  // namespace torchcomms_pg
