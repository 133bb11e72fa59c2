// A communicator's part in hang diagnoses, and in finding late ranks: what it asks and answers for
// its rank. comm/Watchdog reacts to a verdict.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/AtomicShared.hpp"
#include "comm/Identity.hpp"
#include "comm/Observer.hpp"
#include "comm/Relaxations.hpp"
#include "diagnosis/group/GroupActivity.hpp"
#include "diagnosis/group/LatenessClient.hpp"
#include "diagnosis/group/ProcessActivity.hpp"
#include "diagnosis/group/StandingVerdicts.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "handle/CommHandle.hpp"
#include "host/Peer.hpp"

namespace torchcomms_pg {

// Observes a communicator, which owns it. Thread-safe.
class DiagnosisClient final : public Observer, public GroupActivity {
 public:
  explicit DiagnosisClient(const Observed& comm);

  // Returns the observer of a communicator, which is a DiagnosisClient if the process is observed
  // (Observation.hpp).
  static DiagnosisClient& of(Observer& observer) { return static_cast<DiagnosisClient&>(observer); }

  // Sets how long an operation takes before the ranks print a verdict that ends nothing, in groups
  // that are opened from now on; 0 for no such verdict.
  static void setVerdictAfter(Milliseconds time);

  // Observer.
  void open(
      const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
      const std::vector<Peer>& peers) override;
  void close() override;
  void check(Clock::time_point now) REQUIRES(monitorThread) override;
  std::optional<Explanation> ask(const Operation& op, Clock::time_point now) override;
  std::optional<Explanation> final() override;
  Explanation await(const Operation& op, Milliseconds timeout, Clock::time_point deadline) override;
  std::optional<Explanation> onFailure(
      const Operation& op, ncclResult_t result, const std::string& why) override;
  std::optional<Explanation> awaitOthers() override;
  std::string leftWords(const std::vector<int>& ranks) override;
  void failed(const Failure& failure) override;
  // Asks all ranks of the process's largest group, if it is larger than this one, to write their
  // records: torch's analyser needs the records of all ranks. Blocks for at most a second.
  void askForDumps() override;
  // Notifies the other ranks that this rank's record is written, and waits for the records of the
  // others, except dead ones, for at most `patience`.
  void awaitDumps(Milliseconds patience) override;
  void arrive(uint64_t seq, Clock::time_point at) override { lateness_.arrive(seq, at); }
  std::shared_ptr<EndObserver> follow() override { return lateness_.follow(); }
  void beginWait() override { BackwardPass::forget(); }
  void wait(Clock::duration time, bool collective) override { lateness_.wait(time, collective); }

  // GroupActivity.
  int rank() const override { return comm_.self.rank(); }
  int size() const override { return comm_.self.size(); }
  const Group& group() const override { return comm_.self.group(); }
  std::vector<int64_t> globalRanks() const override { return comm_.self.globalRanks(); }
  uint64_t key() const override { return key_; }
  const InFlightOps& inFlight() const override { return comm_.inFlight; }
  const IssueCounts& issued() const override { return comm_.issued; }
  bool queues() const override { return comm_.self.queues(); }
  bool meetsRootAlone() const override { return !queues() && group().hosts.empty(); }
  Milliseconds relaxed() const override { return comm_.relaxations.left(); }
  bool closed() const override { return comm_.library.closed(); }
  std::string failureMessage() const override;
  // Does nothing if the group has failed.
  void leave(const std::string& how) noexcept override;
  const LatenessClient& lateness() const override { return lateness_; }
  DiagnosisRequest request(
      const Operation& op, Clock::time_point now, Milliseconds timeout,
      Clock::time_point deadline) const override;

 private:
  // Makes the other ranks look at the board, and returns the number of the library's rings.
  uint64_t ring() const;
  // Checks for questions of other ranks, and reports this rank's status if one is wanted.
  void answer(Clock::time_point now) REQUIRES(monitorThread);

  const Observed comm_;
  AtomicShared<HangDiagnosis> diagnosis_;  // null before open()
  AtomicShared<HangDiagnosis> early_;      // finds verdicts that end nothing; null for none
  Milliseconds earlyAfter_{0};             // set before `early_`
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<Peer> peers_;
  uint64_t key_ = 0;                       // the group's key, see GroupCounts
  AtomicShared<const StatusPart> status_;  // may be null; null when closed
  AtomicShared<status::Hosts> hosts_;  // null unless rings go through the store; null when closed
  LatenessClient lateness_;

  uint64_t heardRings_ GUARDED_BY(monitorThread) = 0;
  StandingVerdicts earlyVerdicts_{*this};
};

}  // namespace torchcomms_pg
