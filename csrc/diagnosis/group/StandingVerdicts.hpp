// Verdicts that end nothing: on groups of other backends, and before the deadline of this project's
// groups.
#pragma once

#include <optional>
#include <string>

#include "base/Mutex.hpp"
#include "diagnosis/group/GroupActivity.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "monitor/Deadlines.hpp"
#include "monitor/MonitorThread.hpp"

namespace torchcomms_pg {

// Makes the ranks of a group find a verdict on each operation that takes too long, and print its
// end.
class StandingVerdicts {
 public:
  struct Overdue {
    Operation op;
    Clock::time_point begun;  // time from which its deadline counts
  };

  explicit StandingVerdicts(const GroupActivity& group) : group_(group) {}

  // Ends the verdict to which this rank led, if its operation has ended. Returns true once for each
  // verdict that stands.
  bool look(HangDiagnosis& diagnosis) REQUIRES(monitorThread);
  // Returns the oldest operation without a verdict that has taken longer than `timeout`. Returns
  // nullopt while another one is diagnosed.
  std::optional<Overdue> overdue(Clock::time_point now, Milliseconds timeout) const
      REQUIRES(monitorThread);
  // Asks for a verdict on `overdue`, if it is set and has not ended, and goes on asking until a
  // verdict exists.
  void ask(
      HangDiagnosis& diagnosis, const std::optional<Overdue>& overdue, Clock::time_point now,
      Milliseconds timeout) REQUIRES(monitorThread);

  // Closes the diagnosis, since the group is being destroyed. If a verdict stands, first makes the
  // ranks print how it is over.
  void close(HangDiagnosis& diagnosis);

 private:
  // Reacts to the verdict that this rank got when it asked about `op`, which waits for `asked`.
  void take(
      const Verdict& verdict, const Operation& op, const Wait& asked, Clock::time_point now,
      Milliseconds timeout) REQUIRES(monitorThread);
  // Notes the operation of this rank that the standing verdict is about.
  void follow(const Wait& about) REQUIRES(mutex_);
  std::string endOf(const Operation& op) const;
  // Write the verdict for the launcher, and take it back if an operation has completed since: the
  // process's end then has another reason.
  void writeForLauncher(const Verdict& verdict) REQUIRES(mutex_);
  void takeBack() REQUIRES(mutex_);
  Clock::time_point latestCompleted() const;

  const GroupActivity& group_;
  std::optional<Overdue> asked_ GUARDED_BY(monitorThread);  // the diagnosed operation
  // Operations issued before this time need no further verdict.
  Clock::time_point settled_ GUARDED_BY(monitorThread){};
  // Time of the verdict that look() has returned.
  Clock::time_point seen_ GUARDED_BY(monitorThread){};
  Deadlines deadlines_ GUARDED_BY(monitorThread);

  Mutex mutex_;
  // The operations of the verdicts to which this rank and another rank led.
  std::optional<Operation> subject_ GUARDED_BY(mutex_);
  std::optional<Operation> followed_ GUARDED_BY(mutex_);
  bool ended_ GUARDED_BY(mutex_) = false;   // this rank has ended the standing verdict
  std::string written_ GUARDED_BY(mutex_);  // text that writeForLauncher() has written, or ""
  Clock::time_point completed_ GUARDED_BY(mutex_){};  // latestCompleted() at that time
};

}  // namespace torchcomms_pg
