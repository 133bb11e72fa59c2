// A communicator's part in hang diagnoses: its rank's requests, its status, and its reaction to a
// verdict.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/AtomicShared.hpp"
#include "comm/Communicator.hpp"
#include "comm/Peer.hpp"
#include "comm/ProcessActivity.hpp"
#include "comm/StandingVerdicts.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "monitor/Deadlines.hpp"

namespace torchcomms_pg {

class DiagnosisClient {
 public:
  explicit DiagnosisClient(Communicator& comm) : comm_(comm), earlyVerdicts_(comm) {}

  // `peers`: the ranks' processes. A group of one rank has no part in any diagnosis.
  void open(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& prefix,
      std::vector<Peer> peers);
  // Does the same as open(), in a part of the parent's store, and as watchOver() if the parent
  // watches over processes. `ranks`: the ranks of the parent that are in this group.
  void openLike(
      const DiagnosisClient& parent, const std::string& prefix, const std::vector<int>& ranks);
  // Does the same for a shrunk group without the ranks of `gone`. Each shrink of the parent without
  // the same ranks gets another part of the store, numbered in the order that all staying ranks
  // share: a reused part would hold the verdict of an earlier group.
  void openShrunk(DiagnosisClient& parent, const std::vector<int>& gone);
  // From now on checks whether processes of this host are alive, if operations in flight need them,
  // for a library that does not report deaths. Call once, after open().
  void watchOver();
  // Stops making requests and reporting this rank's status. Does not block.
  void close();
  uint64_t key() const { return key_; }

  // Does what is due. Called in the monitor's thread, at each of its rounds.
  void check(Clock::time_point now) noexcept;

  // Notifies the other ranks that this rank's record is written, and waits for the records of the
  // others, except dead ones, for at most `patience`.
  void awaitDumps(Milliseconds patience);

  // Does the same as checkDeadline() for a wait of `timeout` that should have ended at `deadline`,
  // but blocks, for at most HangDiagnosis::kLimit. Returns how much longer to wait, or nullopt
  // if the communicator has failed.
  std::optional<Milliseconds> judge(
      const Operation& op, Milliseconds timeout, Clock::time_point deadline);

  // Returns the ranks' verdict on the library's failure of `op`, or nullopt if nothing is known
  // beyond `why`.
  std::optional<Verdict> onFailure(
      const Operation& op, ncclResult_t result, const std::string& why);

  // Leaves word that this rank ends the group, unless the group has failed.
  void leave(const std::string& how) const noexcept;
  // Returns the words that `ranks` have left, see left_words::tell().
  std::string leftWords(const std::vector<int>& ranks) const noexcept;

  // Asks all ranks of the process's largest group, if it is larger than this one, to write their
  // records: torch's analyser needs the records of all ranks. Blocks for at most a second.
  void askForDumps();

  // For the next `time`, makes peers wait for this rank past their deadlines, and lets operations
  // issued on this rank take that long. Returns the time at which this relaxation ends;
  // endRelaxation() with that time ends it earlier.
  Clock::time_point relax(Milliseconds time);
  void endRelaxation(Clock::time_point end);
  // Returns the time until all relaxations have ended.
  Milliseconds relaxed() const;

  // Sets after which time of an operation the ranks of groups that are opened from now on print a
  // verdict that ends nothing; 0 for none.
  static void setVerdictAfter(Milliseconds time);

 private:
  // Fails the communicator if an operation in flight can no longer end, since a rank has died.
  // Returns whether it has failed the communicator.
  bool noticeDeath(Clock::time_point now);
  // Checks for questions of other ranks, and reports this rank's status if one is wanted.
  void answer(Clock::time_point now);
  // Once there is a verdict on the operation whose deadline has passed, fails the communicator or
  // extends the deadline.
  void checkDeadline(const std::optional<Operation>& overdue, Clock::time_point now);
  // Starts a thread that finds out why the library failed while `op` was in flight, and fails the
  // communicator. The monitor's thread must not block in this, as it reports this rank's status to
  // the other ranks.
  void explainFailure(const Operation& op);

  // Start a thread that fails the communicator while nothing is in flight: learnOfFailure() if the
  // library has failed, learnOfVerdict() if another rank's diagnosis has ended with a verdict.
  void learnOfFailure();
  void learnOfVerdict();
  // Builds the request for `op` after the operation's own deadline.
  DiagnosisRequest request(const Operation& op, Clock::time_point now);
  // Builds the request for `op` after the deadline of a wait.
  DiagnosisRequest request(
      const Operation& op, Clock::time_point now, Milliseconds timeout, Clock::time_point deadline);
  // Prints why `op` goes on waiting after `timeout`, once for each operation.
  void tellExtension(const Operation& op, Milliseconds timeout, const std::string& why);
  HangDiagnosis::Snapshot snapshot(Clock::time_point now);
  // Does what is due for verdicts that end nothing.
  void checkEarly(Clock::time_point now);
  // Writes the recorder's dump in a separate thread.
  void dump() const;
  void apart(std::function<void()> body);
  std::shared_ptr<HangDiagnosis> diagnosis() const { return diagnosis_.load(); }

  Communicator& comm_;
  AtomicShared<HangDiagnosis> diagnosis_;  // null without peers or a store
  AtomicShared<HangDiagnosis> early_;      // finds verdicts that end nothing; null for none
  Milliseconds earlyAfter_{0};             // set before `early_`
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<Peer> peers_;
  uint64_t key_ = 0;                 // the group's key, see GroupCounts
  AtomicShared<StatusPart> status_;  // may be null; null when closed
  std::mutex relaxationsMutex_;
  std::multiset<Clock::time_point> relaxations_;  // ends of relaxations that go on
  std::atomic<Clock::rep> relaxedUntil_{0};       // the last of them, or 0
  std::mutex shrunkMutex_;
  std::map<std::vector<int>, int> shrunk_;  // number of shrinks, by the ranks left out
  std::atomic<bool> explaining_{false};
  std::atomic<uint64_t> extended_{0};  // seq of the operation whose extension was printed last

  using Watched = std::vector<std::pair<int, Peer>>;
  AtomicShared<const Watched> watched_;  // may be null

  // State of the monitor's thread.
  Clock::time_point lookedAt_{};           // time of the last look at `watched_`
  std::map<int, Clock::time_point> dead_;  // dead ranks, with the time since when that is known
  uint64_t heardRings_ = 0;
  int idleTicks_ = 0;
  Deadlines deadlines_;
  std::optional<Operation> overdue_;  // subject of the diagnosis
  StandingVerdicts earlyVerdicts_;
};

}  // namespace torchcomms_pg
