// The protocol by which the ranks of a group find a verdict. Independent of torch, of threads and
// of the clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/hang/Parting.hpp"
#include "diagnosis/hang/RunningTime.hpp"
#include "diagnosis/hang/SharedBoard.hpp"
#include "diagnosis/hang/Verdict.hpp"
#include "diagnosis/rank/PythonStackDump.hpp"

namespace torchcomms_pg {

// One rank's steps in the diagnoses of its group, which have one round after another. In a round,
// the first rank that asks leads: it rings the others, all ranks write their status on the board,
// and the leader writes the verdict.
//
// The first text under a round's key "verdict" ends the round for all ranks, so that all have one
// verdict. If the leader writes none in time, the others write that the round is void, and a rank
// that has asked leads the next one. So a leader that was stopped meanwhile cannot write a verdict
// on statuses that have changed since: it reads that the round is void.
//
// Used by one thread.
class DiagnosisProtocol {
 public:
  using Clock = std::chrono::steady_clock;

  // Status of this rank, provided by the monitor on request.
  struct Snapshot {
    RankStatus answer;
    std::shared_ptr<const void> stack;  // stack of the call in `answer.current`, if known
  };

  struct Options {
    int rank = 0;
    std::string number;                              // `rank` for texts
    std::vector<int> ranks;                          // ranks that take part
    std::function<Silent(int rank)> describeSilent;  // describes a rank that has not answered
    // Called before each look at the board, also to look for the library's news; may be empty. May
    // block, and raise as a SharedBoard may.
    std::function<void()> look;
    std::function<void(const std::string& text)> print;  // prints a verdict, or its end
    std::function<void()> dump;  // called when another rank asks; must not block or throw
    // Set if a ring takes some time. Returns by how much more than a second it may be late; a round
    // has that much more time for its answers and its verdict. Must not block.
    std::function<std::chrono::milliseconds()> slack;
    // True if the group goes on after a verdict. The verdict stands until its operation ends, and
    // others may follow.
    bool goesOn = false;
  };

  // What this rank's other threads want of a step.
  struct Wanted {
    std::optional<DiagnosisRequest> request;  // asks for a verdict
    bool dumps = false;                       // asks the other ranks for dumps
    std::optional<Snapshot> status;           // if wantsStatus()
    std::optional<std::string> end;           // ends the standing verdict to which this rank led
  };

  // What other threads learn of a step.
  struct Outcome {
    bool rings = false;   // the ranks that hear this one are to look
    bool looked = false;  // no diagnosis goes on, or one has just ended
    bool askedForDumps = false;
    std::vector<std::string> ends;   // the texts with which standing verdicts have been ended
    bool ended = false;              // a round has ended
    std::optional<Verdict> verdict;  // its verdict; nullopt if the round was void
    bool own = false;                // it is this rank's, which prints all of it
    bool over = false;               // the verdict had been ended before this rank read it
    std::string broken;              // reason why the board cannot be used from now on, or ""
  };

  DiagnosisProtocol(std::unique_ptr<SharedBoard> board, Options options);

  // Does what is due at `now`. May block in the board.
  Outcome step(Wanted wanted, Clock::time_point now);
  // Returns whether no round goes on.
  bool idle() const { return phase_ == Phase::idle; }
  // A verdict that stands in a group that goes on.
  struct Standing {
    std::string key;  // the board has, under this key, the text that ends the verdict
    bool led = false;
    Clock::time_point since;
    Wait about;
  };
  // Returns the latest standing verdict, or nullopt if no verdict stands.
  std::optional<Standing> standing() const {
    return standing_.empty() ? std::nullopt : std::optional(standing_.back());
  }
  // Returns whether this rank has led to a standing verdict.
  bool ledStanding() const { return std::ranges::any_of(standing_, &Standing::led); }
  // Returns whether the next step needs Wanted::status.
  bool wantsStatus() const { return phase_ == Phase::answering && !round_.stacks; }
  // Returns the time, after `now`, of the next look for the end of a standing verdict.
  static Clock::time_point nextLook(Clock::time_point now);
  // Returns the time that rounds have for late rings.
  std::chrono::milliseconds slack() const {
    return options_.slack ? options_.slack() : std::chrono::milliseconds(0);
  }
  // Returns the time until the next step of a round.
  std::chrono::microseconds tick() const;

  const Options& options() const { return options_; }

 private:
  // A longer gap between two steps does not count as time for which the answers were awaited.
  static constexpr std::chrono::milliseconds kGap{1000};

  enum class Phase { idle, answering, leading, following, parting };

  void advance();
  void look();
  void lookForDumps();
  void endStanding();
  void publish();
  void write();
  void lead();
  void follow();
  bool read();
  void part();
  void declareVoid();
  void supersede();
  bool isOver(const std::string& overKey);
  void finish(const std::optional<Verdict>& verdict);
  std::string key(const std::string& name) const;

  struct Round {
    bool leads = false;
    Clock::time_point begun;
    RunningTime ran{kGap};                    // since `begun`
    std::optional<DiagnosisRequest> request;  // this rank's, if it leads
    RankStatus answer;
    std::optional<PythonStackDump> stacks;
    bool published = false;  // the preliminary answer is on the board
    Answers answers;
    int64_t told = 0;  // number of ranks that had answered at the last look
    std::optional<Verdict> verdict;
    bool own = false;                // `verdict` is this rank's
    std::optional<Parting> parting;  // the leader's
    PartingAnswers partingAnswers;
    bool listens = false;  // the next look is for the leader's questions, not for the verdict
    bool wrote = false;    // this rank has written the verdict
    std::optional<Clock::time_point> read;
  };

  const std::unique_ptr<SharedBoard> board_;
  const Options options_;
  Wanted wanted_;
  Outcome outcome_;
  Clock::time_point now_;           // when the current step began
  std::vector<Standing> standing_;  // the oldest first
  int64_t dumps_ = 0;               // number of requests for dumps that this rank knows of
  Phase phase_ = Phase::idle;
  uint64_t rounds_ = 0;  // number of rounds that have ended
  Round round_;
};

}  // namespace torchcomms_pg
