// A communicator's part in diagnoses: what its rank asks, answers, and does
// upon a verdict.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "comm/Communicator.hpp"
#include "monitor/HangDiagnosis.hpp"

namespace torchcomms_pg {

class DiagnosisClient {
 public:
  explicit DiagnosisClient(Communicator& comm) : comm_(comm) {}

  void open(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix);
  // In a part of the parent's store.
  void openLike(const DiagnosisClient& parent, const std::string& prefix);
  // From now on nobody asks and nobody is answered. Does not block.
  void close();

  // Looks what is due, on the monitor's thread, each time it comes by.
  void check(Clock::time_point now) noexcept;

  // Tells the other ranks that this one's record is written, and waits for theirs, but not for
  // those of the dead, and for no longer than `patience`.
  void awaitDumps(Milliseconds patience);

  // As checkDeadline() for a wait of `timeout` that should have ended at `deadline`, but blocks,
  // for at most HangDiagnosis::kPatience. None: it has failed; else how much longer to wait.
  std::optional<Milliseconds> judge(
      const Operation& op, Milliseconds timeout, Clock::time_point deadline);

  // What the ranks know of the library's failure of `op`; none: nothing beyond `why`.
  std::optional<Verdict> onFailure(
      const Operation& op, ncclResult_t result, const std::string& why);

  // Has all ranks of the process's largest group, where that is larger than this one, write their
  // records: torch's analyser wants those of all ranks. Blocks for at most a second.
  void askForDumps();

  void relax(Milliseconds time);
  // What is left of that.
  Milliseconds relaxed() const;

 private:
  // Answers other ranks.
  void answer(Clock::time_point now);
  // Fails the communicator, once there is a verdict on the operation whose
  // deadline has passed; or extends the deadline.
  void checkDeadline(const std::optional<Operation>& overdue, Clock::time_point now);
  // Has a thread of its own find out what the library has failed with, while
  // `op` was in flight, and fail the communicator. The monitor must go on
  // meanwhile: it is what answers the other ranks.
  void explainFailure(const Operation& op);

  // The same where nothing is in flight, and where another rank's diagnosis has ended with a
  // verdict.
  void learnOfFailure();
  void learnOfVerdict();
  // Of `op` after its own deadline, the group's.
  DiagnosisRequest request(const Operation& op, Clock::time_point now);
  // Of `op` after that of a wait.
  DiagnosisRequest request(
      const Operation& op, Clock::time_point now, Milliseconds timeout, Clock::time_point deadline);
  // Says why `op` waits on after `timeout`, once for each operation.
  void tellExtension(const Operation& op, Milliseconds timeout, const std::string& why);
  HangDiagnosis::Snapshot snapshot(Clock::time_point now);
  // Fills in what this process waits for in another of its groups.
  void tellElsewhere(RankStatus& answer);
  void apart(std::function<void()> body);
  std::shared_ptr<HangDiagnosis> diagnosis() const { return std::atomic_load(&diagnosis_); }

  Communicator& comm_;
  std::shared_ptr<HangDiagnosis>
      diagnosis_;  // by std::atomic_load; null: a rank alone, or no store
  c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<Clock::rep> relaxedUntil_{0};
  std::atomic<bool> explaining_{false};
  std::atomic<uint64_t> extended_{0};  // the operation that tellExtension() told of

  // Of the monitor's thread.
  uint64_t heardRings_ = 0;
  int idleTicks_ = 0;
  std::optional<Operation> overdue_;   // what is inquired about
  Clock::time_point extendedUntil_{};  // of what was issued before extendedAt_
  Clock::time_point extendedAt_{};
};

}  // namespace torchcomms_pg
