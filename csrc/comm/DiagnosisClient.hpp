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

#include "comm/Communicator.hpp"
#include "comm/Peer.hpp"
#include "comm/ProcessActivity.hpp"
#include "monitor/HangDiagnosis.hpp"

namespace torchcomms_pg {

class DiagnosisClient {
 public:
  explicit DiagnosisClient(Communicator& comm) : comm_(comm) {}

  // `peers`: the processes of the ranks. A rank alone has no part in any diagnosis.
  void open(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::string& prefix,
      std::vector<Peer> peers);
  // Opens it in a part of the parent's store, and watches over the processes if the parent does.
  // `ranks`: those of the parent that are in this group.
  void openLike(
      const DiagnosisClient& parent, const std::string& prefix, const std::vector<int>& ranks);
  // Does the same, in another part for each group of the parent without the ranks of `gone`, which
  // the ranks that stay make in one order. A part that is used again holds the verdict of before.
  void openShrunk(DiagnosisClient& parent, const std::vector<int>& gone);
  // Looks from now on whether processes of this host that operations in flight need are alive, for
  // a library that does not tell. Call once, after open().
  void watchOver();
  // Stops making requests and giving this rank's status. Does not block.
  void close();
  uint64_t key() const { return key_; }

  // Does what is due. Called on the monitor's thread, at each of its rounds.
  void check(Clock::time_point now) noexcept;

  // Tells the other ranks that this one's record is written, and waits for theirs, except for those
  // of dead ranks, for at most `patience`.
  void awaitDumps(Milliseconds patience);

  // Does the same as checkDeadline() for a wait of `timeout` that should have ended at `deadline`,
  // but blocks, for at most HangDiagnosis::kPatience. Returns how much longer to wait; none: the
  // communicator has failed.
  std::optional<Milliseconds> judge(
      const Operation& op, Milliseconds timeout, Clock::time_point deadline);

  // Returns the ranks' verdict on the library's failure of `op`; none: nothing is known beyond
  // `why`.
  std::optional<Verdict> onFailure(
      const Operation& op, ncclResult_t result, const std::string& why);

  // Asks all ranks of the process's largest group, where that is larger than this one, to write
  // their records: torch's analyser wants those of all ranks. Blocks for at most a second.
  void askForDumps();

  // Makes peers wait for this rank past their deadlines for the next `time`, and lets operations
  // issued here take that long. Returns when that ends, for endRelaxation(), which ends it before.
  Clock::time_point relax(Milliseconds time);
  void endRelaxation(Clock::time_point end);
  // Returns how much time is left until all of relax() have ended.
  Milliseconds relaxed() const;

 private:
  // Fails the communicator if an operation in flight cannot end any more, since a rank has died.
  // Returns whether it does.
  bool noticeDeath(Clock::time_point now);
  // Listens to other ranks, and gives this rank's status where one is wanted.
  void answer(Clock::time_point now);
  // Fails the communicator, once there is a verdict on the operation whose deadline has passed; or
  // extends the deadline.
  void checkDeadline(const std::optional<Operation>& overdue, Clock::time_point now);
  // Starts a thread that finds out why the library has failed, while `op` was in flight, and fails
  // the communicator. The monitor must go on meanwhile: it gives the other ranks this one's status.
  void explainFailure(const Operation& op);

  // Do the same where nothing is in flight, and where another rank's diagnosis has ended with a
  // verdict.
  void learnOfFailure();
  void learnOfVerdict();
  // Builds the request for `op` after its own deadline, the group's.
  DiagnosisRequest request(const Operation& op, Clock::time_point now);
  // Builds the request for `op` after the deadline of a wait.
  DiagnosisRequest request(
      const Operation& op, Clock::time_point now, Milliseconds timeout, Clock::time_point deadline);
  // Prints why `op` waits on after `timeout`, once for each operation.
  void tellExtension(const Operation& op, Milliseconds timeout, const std::string& why);
  HangDiagnosis::Snapshot snapshot(Clock::time_point now);
  void apart(std::function<void()> body);
  std::shared_ptr<HangDiagnosis> diagnosis() const { return std::atomic_load(&diagnosis_); }

  Communicator& comm_;
  std::shared_ptr<HangDiagnosis>
      diagnosis_;  // accessed by std::atomic_load; null: a rank alone, or no store
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<Peer> peers_;
  uint64_t key_ = 0;                    // that of the group, see GroupCounts
  std::shared_ptr<StatusPart> status_;  // accessed by std::atomic_load; null: none, or closed
  std::mutex relaxationsMutex_;
  std::multiset<Clock::time_point> relaxations_;  // ends of those that have not been ended
  std::atomic<Clock::rep> relaxedUntil_{0};       // the last of them; 0: there are none
  std::mutex shrunkMutex_;
  std::map<std::vector<int>, int> shrunk_;  // number of groups by the ranks that they lack
  std::atomic<bool> explaining_{false};
  std::atomic<uint64_t> extended_{0};  // seq of the operation that tellExtension() told of

  using Watched = std::vector<std::pair<int, Peer>>;
  std::shared_ptr<const Watched> watched_;  // accessed by std::atomic_load; null: none

  // State of the monitor's thread.
  Clock::time_point lookedAt_{};           // at the watched
  std::map<int, Clock::time_point> dead_;  // ranks, since when that is known
  uint64_t heardRings_ = 0;
  int idleTicks_ = 0;
  std::optional<Operation> overdue_;   // subject of the diagnosis
  Clock::time_point extendedUntil_{};  // deadline of operations issued before extendedAt_
  Clock::time_point extendedAt_{};
};

}  // namespace torchcomms_pg
