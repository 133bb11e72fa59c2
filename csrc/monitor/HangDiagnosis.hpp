// Finds out, together with the other ranks of a group, which rank holds it up. Knows nothing of
// torch: the ranks write to a SharedBoard.
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

// Storage that all ranks of a group, and no others, can read and write. Calls may block, and raise
// std::exception. Used by one thread.
class SharedBoard {
 public:
  virtual ~SharedBoard() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Returns whether `value`, which is this rank's alone, is the first for `key`.
  virtual bool claim(const std::string& key, const std::string& value) = 0;
  virtual int64_t add(const std::string& key, int64_t value) = 0;
};

// One rank's part in the diagnoses of a group, one after another. The first rank whose deadline
// passes leads: it makes the others ring, all of them write what they know of themselves, and the
// leader writes the verdict, which is the same everywhere. Each rank prints it.
//
// A thread of its own makes the calls that may block, while a diagnosis goes on. So the monitor and
// the threads that wait here are bounded whatever becomes of the board: then the verdict says that
// it cannot be known.
//
// Thread-safe.
class HangDiagnosis : public std::enable_shared_from_this<HangDiagnosis> {
 public:
  using Clock = std::chrono::steady_clock;

  // Limit of the time until there is a verdict, for better or worse.
  static constexpr std::chrono::milliseconds kPatience{4000};

  // Status of this rank, which the monitor gives when it is asked.
  struct Snapshot {
    RankStatus answer;
    std::shared_ptr<const void> stack;  // stack of the call in `answer.current`, where known
  };

  struct Options {
    int rank = 0;
    std::string number;                              // `rank` for texts
    std::vector<int> ranks;                          // those that take part
    std::function<Silent(int rank)> describeSilent;  // describes a rank that does not answer
    // Set where a ring does not reach all ranks: the board is then looked at now and then, and this
    // called before. `thorough`: there may be news. Returns whether there is, for the ranks that
    // hear this one ring. May block, and raise as a SharedBoard may.
    std::function<bool(bool thorough)> poll;
    // Turn of this rank among those that hear each other ring, which look for a second each.
    int turn = 0;
    int turns = 1;
    std::function<void()> dump;  // answers another rank's request; must not block, nor throw
    // The group goes on after a verdict, which may be over later; and others may follow.
    bool goesOn = false;
  };

  static std::shared_ptr<HangDiagnosis> open(std::unique_ptr<SharedBoard> board, Options options);
  void close();

  // The functions up to takeRing() are for the monitor's thread; none of them blocks.
  //
  // Returns the verdict; none while it is being found out, at most kPatience.
  std::optional<Verdict> ask(const DiagnosisRequest& request);
  // Notes that another rank may have asked.
  void notice();
  // Returns whether answer() is to be called.
  bool wantsStatus() const { return wantsStatus_.load(std::memory_order_acquire); }
  void answer(Snapshot snapshot);
  // Returns the verdict of a diagnosis that has ended with the group's failure; none: there was
  // none.
  std::optional<Verdict> final() const;
  // Of a group that goes on: returns the time of the verdict that stands; none: none does.
  std::optional<Clock::time_point> standing() const;
  // Has all ranks print `text` in place of the verdict that stands, if this rank has led to it: it
  // is over.
  void end(const std::string& text);
  // Returns whether the others have to be told, by ringing; true once.
  bool takeRing() { return ring_.exchange(false, std::memory_order_acq_rel); }

  // Makes the other ranks, once they hear a ring, call Options::dump. Blocks until the board has
  // the request, at most a second. Not for the monitor's thread.
  void askForDumps();

  // Blocks until there is a verdict, at most kPatience. Not for the monitor's thread.
  Verdict await(const DiagnosisRequest& request);
  // Waits for the verdict of a diagnosis that another rank has begun; none: no rank has begun one.
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
  std::optional<Clock::time_point> stepping_;  // since when its thread may be in the store
  uint64_t looked_ = 0;                        // number of looks whether another rank has asked
  std::optional<DiagnosisRequest> asked_;
  Clock::time_point askedAt_;
  std::optional<Snapshot> snapshot_;
  std::optional<Verdict> verdict_;
  Wait verdictOn_;      // what this rank had asked about
  std::string broken_;  // reason why the board is of no use
  // A verdict of a group that goes on.
  struct Standing {
    std::string key;  // of the board, where the text is that ends it
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
  int64_t dumps_ = 0;  // number of requests for dumps, as far as is known
  Phase phase_ = Phase::idle;
  uint64_t rounds_ = 0;
  Round round_;
};

}  // namespace torchcomms_pg
