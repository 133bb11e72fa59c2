// Finds out, together with the other ranks of a group, which rank holds the group up. Independent
// of torch: the ranks exchange texts through a SharedBoard.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "monitor/PythonStackDump.hpp"
#include "monitor/Verdict.hpp"

namespace torchcomms_pg {

// Key-value store that all ranks of a group, and no others, can read and write. Calls may block,
// and raise std::exception. Used by one thread.
class SharedBoard {
 public:
  virtual ~SharedBoard() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Returns whether `value` is the first for `key`. No other rank passes the same value.
  virtual bool claim(const std::string& key, const std::string& value) = 0;
  virtual int64_t add(const std::string& key, int64_t value) = 0;
};

// One rank's part in the diagnoses of a group, one after another. The first rank whose deadline
// passes leads: it rings the others, all ranks write their status on the board, and the leader
// writes the verdict, which every rank prints.
//
// A separate thread makes all calls that may block while a diagnosis goes on. So the monitor, and
// threads that wait for a verdict, wait for a bounded time whatever happens to the board. If it
// fails, the verdict says that the cause cannot be known.
//
// Thread-safe.
class HangDiagnosis : public std::enable_shared_from_this<HangDiagnosis> {
 public:
  using Clock = std::chrono::steady_clock;

  // Time limit of a diagnosis, after which the verdict is that the cause cannot be known.
  static constexpr std::chrono::milliseconds kPatience{4000};

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
    // Set if a ring does not reach all ranks: this rank then looks at the board from time to time,
    // and calls poll() before each look. Returns true if there is news: then the ranks that receive
    // this rank's rings have to look as well. `thorough`: there may be news. May block, and raise
    // as a SharedBoard may.
    std::function<bool(bool thorough)> poll;
    // Turn of this rank among the ranks that ring each other: each in turn looks for a second.
    int turn = 0;
    int turns = 1;
    std::function<void()> dump;  // called when another rank asks; must not block or throw
    // True if the group goes on after a verdict. The verdict may be ended later, and others may
    // follow.
    bool goesOn = false;
  };

  static std::shared_ptr<HangDiagnosis> open(std::unique_ptr<SharedBoard> board, Options options);
  void close();

  // The functions up to takeRing() are for the monitor's thread; none of them blocks.
  //
  // Asks for a verdict, and returns it once it is found, after at most kPatience.
  std::optional<Verdict> ask(const DiagnosisRequest& request);
  // Makes this rank look at the board, since another rank may have asked.
  void notice();
  // Returns whether answer() is to be called.
  bool wantsStatus() const { return wantsStatus_.load(std::memory_order_acquire); }
  void answer(Snapshot snapshot);
  // Returns the verdict of a diagnosis that ended with the group's failure, or nullopt if there was
  // no such diagnosis.
  std::optional<Verdict> final() const;
  // Returns the time of the standing verdict of a group that goes on, or nullopt if no verdict
  // stands.
  std::optional<Clock::time_point> standing() const;
  // Ends the standing verdict if this rank led to it: all ranks print `text`.
  void end(const std::string& text);
  // Returns whether to ring the other ranks; true once for each reason.
  bool takeRing() { return ring_.exchange(false, std::memory_order_acq_rel); }

  // Asks the other ranks to call Options::dump when a ring reaches them. Blocks until the request
  // is on the board, for at most a second. Not for the monitor's thread.
  void askForDumps();

  // Blocks until there is a verdict, at most kPatience. Not for the monitor's thread.
  Verdict await(const DiagnosisRequest& request);
  // Waits for the verdict of a diagnosis that another rank has begun. Returns nullopt if no rank
  // has begun one.
  std::optional<Verdict> awaitOthers();

 private:
  enum class Phase { idle, answering, leading, following, parting };

  HangDiagnosis(std::unique_ptr<SharedBoard> board, Options options);
  void put(const DiagnosisRequest& request);
  void wake();
  void run();
  void step(Clock::time_point now);
  void look(Clock::time_point now);
  bool lookForDumps(bool wanted);
  Clock::time_point nextTurn() const;
  void publish(Clock::time_point now);
  void lead(Clock::time_point now);
  void follow(Clock::time_point now);
  void part(Clock::time_point now);
  void endStanding();
  bool isOver(const std::string& overKey);
  void finish(const std::optional<Verdict>& verdict);
  std::string key(const std::string& name) const;

  const std::unique_ptr<SharedBoard> board_;
  const Options options_;
  std::atomic<bool> wantsStatus_{false};
  std::atomic<bool> ring_{false};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false;
  bool closed_ = false;
  bool noticed_ = false;
  bool dumpsWanted_ = false;
  // when the current step began; a step may block in the store
  std::optional<Clock::time_point> stepping_;
  uint64_t looked_ = 0;  // number of completed looks for a diagnosis
  std::optional<DiagnosisRequest> asked_;
  Clock::time_point askedAt_;
  std::optional<Snapshot> snapshot_;
  std::optional<Verdict> verdict_;
  Wait verdictOn_;      // what this rank asked about
  std::string broken_;  // reason why the board cannot be used
  // The verdict that stands in a group that goes on.
  struct Standing {
    std::string key;  // the board has, under this key, the text that ends the verdict
    bool led = false;
    Clock::time_point since;
    std::optional<std::string> end;
  };
  std::optional<Standing> standing_;

  // State of the diagnosis's thread.
  struct Round {
    bool leads = false;
    Clock::time_point begun;
    RankStatus answer;
    std::optional<PythonStackDump> stacks;
    std::map<int, RankStatus> answers;
    std::optional<Verdict> verdict;
    Clock::time_point read;
  };
  int64_t dumps_ = 0;  // number of requests for dumps that this rank knows of
  Phase phase_ = Phase::idle;
  uint64_t rounds_ = 0;
  Round round_;
};

}  // namespace torchcomms_pg
