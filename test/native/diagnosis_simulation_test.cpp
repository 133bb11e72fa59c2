// Diagnoses of simulated jobs, on a simulated clock: ranks arrive late or never, stop, die, and use
// a slow store. Whatever happens, what a verdict says was so.
//
// One thread runs at a time, and hands over at each call of the board, so that a seed makes the
// same job again: TEST_SEED=N runs that one alone.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "Check.hpp"
#include "monitor/Deadlines.hpp"
#include "monitor/HangDiagnosis.hpp"

using namespace torchcomms_pg;
using Clock = HangDiagnosis::Clock;
using std::chrono::milliseconds;

namespace {

constexpr uint64_t kGroup = 1;
constexpr uint64_t kSeq = 3;  // of the collective that the ranks have to issue
constexpr milliseconds kTimeout{1000};
constexpr milliseconds kEnd{40'000};  // of the simulation
constexpr Clock::time_point kNever = Clock::time_point::max();

// Time before a verdict within which what it says was so: a round's limit, and some steps.
constexpr milliseconds kFresh{5500};

struct Interval {
  Clock::time_point begin = kNever;
  Clock::time_point end = kNever;
  bool has(Clock::time_point time) const { return begin <= time && time < end; }
  bool overlaps(Clock::time_point from, Clock::time_point to) const {
    return begin <= to && from < end;
  }
};

// What happens to a rank.
struct Fate {
  Clock::time_point arrives = kNever;  // when its program issues the collective
  Interval stopped;                    // until kNever if it has died
};

struct Plan {
  explicit Plan(unsigned seed) : random(seed) {
    size = pick(2, 4);
    goesOn = chance(50);
    hosts = chance(30) ? pick(1, 2) : 0;
    slow = chance(30);
    for (int rank = 0; rank < size; ++rank) {
      auto& fate = fates.emplace_back();
      fate.arrives = chance(60) ? at(pick(0, 1000)) : chance(70) ? at(pick(1000, 12'000)) : kNever;
      if (chance(50)) {
        fate.stopped.begin = at(chance(70) ? pick(1000, 4500) : pick(0, 9000));
        fate.stopped.end =
            chance(20) ? kNever
                       : fate.stopped.begin + milliseconds(pick(50, chance(50) ? 1000 : 9000));
      }
      if (fate.stopped.has(fate.arrives)) fate.arrives = fate.stopped.end;
    }
  }

  static Clock::time_point at(int ms) { return Clock::time_point(milliseconds(1'000'000 + ms)); }
  int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); }
  bool chance(int percent) { return pick(1, 100) <= percent; }
  // Returns when the collective ends: a moment after all have arrived.
  Clock::time_point ends() const {
    Clock::time_point last{};
    for (const auto& fate : fates) last = std::max(last, fate.arrives);
    return last == kNever ? kNever : last + milliseconds(1);
  }

  std::mt19937 random;
  int size = 0;
  bool goesOn = false;
  int hosts = 0;      // number of ranks of a host, beyond which no ring is heard; 0: all hear it
  bool slow = false;  // the store takes up to a second now and then
  std::vector<Fate> fates;
};

class Job {
 public:
  explicit Job(unsigned seed) : plan_(seed), ranks_(plan_.size) {}

  void run() {
    for (int rank = 0; rank < plan_.size; ++rank) {
      ranks_[rank].diagnosis =
          HangDiagnosis::openWithoutThread(std::make_unique<Board>(*this, rank), options(rank));
      ranks_[rank].stepAt = now_;
      ranks_[rank].monitorAt = Plan::at(plan_.pick(0, 50));
      ranks_[rank].thread = std::thread([this, rank] { live(rank); });
    }
    const auto end = Plan::at(0) + kEnd;
    while (turn(end)) {
    }
    over_ = true;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      resume(static_cast<int>(rank));
      ranks_[rank].thread.join();
    }
  }

  struct Got {
    Clock::time_point asked;
    Clock::time_point time;
    Verdict verdict;
  };
  struct Rank {
    std::shared_ptr<HangDiagnosis> diagnosis;
    std::thread thread;
    Clock::time_point stepAt = kNever;  // when the thread goes on; kNever if nothing is due
    Clock::time_point monitorAt;
    bool rung = false;
    bool waits = false;  // for something to be due
    bool failed = false;
    bool subject = false;  // its operation has a verdict
    std::optional<Clock::time_point> asked;
    std::vector<Got> got;
    std::vector<std::string> printed;
    Deadlines deadlines;
  };
  struct Written {
    std::string text;
    Clock::time_point time;
  };

  const Plan& plan() const { return plan_; }
  const std::vector<Rank>& ranks() const { return ranks_; }
  const std::vector<Written>& written() const { return written_; }

 private:
  struct Over {};
  enum : int { kScheduler = -1 };

  class Board : public SharedBoard {
   public:
    Board(Job& job, int rank) : job_(job), rank_(rank) {}
    void set(const std::string& key, const std::string& value) override {
      Call call(*this);
      if (key.ends_with("verdict")) job_.written_.push_back({value, job_.now_});
      job_.values_[key] = value;
    }
    std::optional<std::string> get(const std::string& key) override {
      Call call(*this);
      const auto found = job_.values_.find(key);
      return found == job_.values_.end() ? std::nullopt : std::optional(found->second);
    }
    bool claim(const std::string& key, const std::string& value) override {
      Call call(*this);
      const auto [entry, first] = job_.values_.emplace(key, value);
      if (first && key.ends_with("verdict")) job_.written_.push_back({value, job_.now_});
      return entry->second == value;
    }
    int64_t add(const std::string& key, int64_t value) override {
      Call call(*this);
      auto& text = job_.values_[key];
      const auto sum = (text.empty() ? 0 : std::stoll(text)) + value;
      text = std::to_string(sum);
      return sum;
    }

   private:
    // The way of the call to the store, and of its answer.
    struct Call {
      explicit Call(Board& board) : board(board) { board.travel(); }
      ~Call() noexcept(false) {
        if (!board.job_.over_) board.travel();
      }
      Board& board;
    };
    void travel() {
      auto& plan = job_.plan_;
      const int most = plan.slow && plan.chance(3) ? 1'000'000 : 2000;
      job_.pause(rank_, job_.now_ + std::chrono::microseconds(plan.pick(50, most)));
    }
    Job& job_;
    const int rank_;
  };

  HangDiagnosis::Options options(int rank) {
    HangDiagnosis::Options options;
    options.rank = rank;
    options.number = std::to_string(rank);
    for (int other = 0; other < plan_.size; ++other) options.ranks.push_back(other);
    options.describeSilent = [this](int silent) {
      const bool gone = plan_.fates[silent].stopped.has(now_);
      return Silent{gone ? "is stopped" : "did not answer", gone};
    };
    if (plan_.hosts > 0) {
      options.poll = [](bool) { return false; };
      options.turn = rank % plan_.hosts;
      options.turns = plan_.hosts;
    }
    options.goesOn = plan_.goesOn;
    options.print = [this, rank](const std::string& text) { ranks_[rank].printed.push_back(text); };
    return options;
  }

  // Runs the next rank's thread or monitor. Returns false if that is after `end`.
  bool turn(Clock::time_point end) {
    int next = -1;
    bool monitor = false;
    auto first = kNever;
    for (int rank = 0; rank < plan_.size; ++rank) {
      for (const bool ofMonitor : {false, true}) {
        auto at = ofMonitor ? ranks_[rank].monitorAt : ranks_[rank].stepAt;
        if (plan_.fates[rank].stopped.has(at)) at = plan_.fates[rank].stopped.end;
        if (at < first) {
          first = at;
          next = rank;
          monitor = ofMonitor;
        }
      }
    }
    if (next < 0 || first > end) return false;
    now_ = std::max(now_, first);
    if (monitor) {
      ranks_[next].monitorAt = now_ + milliseconds(50);
      check(next);
    } else {
      resume(next);
    }
    return true;
  }

  // Lets the rank's thread go on until it pauses.
  void resume(int rank) {
    std::unique_lock lock(mutex_);
    running_ = rank;
    changed_.notify_all();
    changed_.wait(lock, [&] { return running_ == kScheduler; });
  }

  // Called in a rank's thread.
  void pause(int rank, Clock::time_point until) {
    ranks_[rank].stepAt = until;
    std::unique_lock lock(mutex_);
    running_ = kScheduler;
    changed_.notify_all();
    changed_.wait(lock, [&] { return running_ == rank; });
    if (over_) throw Over();
  }

  // A rank's thread.
  void live(int rank) {
    auto& self = ranks_[rank];
    try {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return running_ == rank; });
      }
      while (!over_) {
        const auto due = self.diagnosis->due(now_);
        self.waits = due != now_ + milliseconds(20);  // which is a round's next step
        pause(rank, due.value_or(kNever));
        self.waits = false;
        self.diagnosis->step(now_);
      }
    } catch (const Over&) {
    }
    std::lock_guard lock(mutex_);
    running_ = kScheduler;
    changed_.notify_all();
  }

  bool arrived(int rank) const { return plan_.fates[rank].arrives <= now_; }
  bool ended() const { return plan_.ends() <= now_; }

  static Wait wait(int size) {
    Wait wait;
    wait.text = "all_reduce #3 (8 x Float)";
    wait.group = kGroup;
    for (int rank = 0; rank < size; ++rank) wait.members.push_back(rank);
    wait.collectives = {{kSeq, -1}};
    return wait;
  }

  // Does what the monitor does for a communicator, and for a watched group.
  void check(int rank) {
    auto& self = ranks_[rank];
    auto& diagnosis = *self.diagnosis;
    if (diagnosis.takeRing()) {
      for (int other = 0; other < plan_.size; ++other) {
        const bool hears = plan_.hosts == 0 || other / plan_.hosts == rank / plan_.hosts;
        if (hears && other != rank) ranks_[other].rung = true;
      }
    }
    if (std::exchange(self.rung, false)) diagnosis.notice();
    if (diagnosis.wantsStatus()) {
      HangDiagnosis::Snapshot snapshot;
      auto& answer = snapshot.answer;
      answer.rank = rank;
      answer.counts = {{kGroup, arrived(rank) ? kSeq : kSeq - 1, 0, {}}};
      if (arrived(rank) && !ended()) {
        answer.current = "all_reduce #3 (8 x Float)";
        answer.currentSeq = kSeq;
        answer.signature = "all_reduce Float";
        answer.waits = {wait(plan_.size)};
      }
      diagnosis.answer(std::move(snapshot));
    }
    if (plan_.goesOn && self.subject && ended()) {
      self.subject = false;
      diagnosis.end("the verdict is over");
    }
    const auto issued = plan_.fates[rank].arrives;
    const bool overdue = arrived(rank) && !ended() && !self.subject && !diagnosis.standing() &&
                         self.deadlines.passed(issued, issued, kTimeout, now_);
    if (!self.failed && (self.asked || overdue)) {
      if (!self.asked) self.asked = now_;
      DiagnosisRequest request;
      request.rank = rank;
      request.group = "g";
      request.size = plan_.size;
      request.op = "all_reduce #3 (8 x Float)";
      request.signature = "all_reduce Float";
      request.seq = kSeq;
      request.wait = wait(plan_.size);
      request.timeoutMs = kTimeout.count();
      request.ended = ended();
      if (const auto verdict = diagnosis.ask(request, now_)) {
        self.got.push_back({*self.asked, now_, *verdict});
        self.asked.reset();
        if (verdict->extensionMs > 0) {
          self.deadlines.extend(milliseconds(verdict->extensionMs), now_);
        } else if (plan_.goesOn) {
          self.subject = true;
        } else {
          self.failed = true;
        }
      }
    }
    if (self.waits) {
      self.stepAt = std::min(self.stepAt, diagnosis.due(now_).value_or(kNever));
    }
  }

  Plan plan_;
  std::vector<Rank> ranks_;
  Clock::time_point now_ = Plan::at(0);
  std::map<std::string, std::string> values_;
  std::vector<Written> written_;
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = kScheduler;
};

bool saysUnknown(const std::string& text) {
  return text.find("it cannot be known") != std::string::npos;
}

// Checks what was so in the time before the verdict was written.
void checkTrue(const Plan& plan, const Verdict& verdict, Clock::time_point written) {
  const auto from = written - kFresh;
  for (const int rank : verdict.ranks) {
    const auto& fate = plan.fates[rank];
    CHECK(fate.arrives > from || fate.stopped.overlaps(from, written));
  }
  if (verdict.text.find("all ranks have arrived") != std::string::npos) {
    for (const auto& fate : plan.fates) CHECK(fate.arrives <= written);
  }
}

// Checks what a rank was told, and when. `texts`: the verdicts that were written.
void checkTold(
    const Plan& plan,
    const Job::Rank& rank,
    const Interval& stopped,
    const std::vector<std::string>& texts) {
  for (const auto& got : rank.got) {
    const bool unknown = saysUnknown(got.verdict.text);
    CHECK(!unknown || plan.slow);
    CHECK(unknown || std::ranges::count(texts, got.verdict.text) > 0);
    auto took = got.time - got.asked;
    if (stopped.overlaps(got.asked, got.time)) {
      took -= stopped.end - std::max(stopped.begin, got.asked);
    }
    CHECK(took <= HangDiagnosis::kLimit + milliseconds(500));
  }
  const bool lives = stopped.end != kNever || stopped.begin == kNever;
  CHECK(!lives || !rank.asked);  // is kept waiting
  if (!plan.goesOn && !plan.slow) {
    CHECK(rank.printed.size() <= 1);  // one verdict, with which the group fails
  }
}

struct Counts {
  int verdicts = 0;
  int voids = 0;
};

void checkJob(unsigned seed, Counts& counts) {
  Job job(seed);
  job.run();
  std::vector<std::string> texts;
  for (const auto& written : job.written()) {
    if (const auto verdict = decodeVerdict(written.text)) {
      ++counts.verdicts;
      checkTrue(job.plan(), *verdict, written.time);
      texts.push_back(verdict->text);
    } else {
      ++counts.voids;
    }
  }
  for (size_t rank = 0; rank < job.ranks().size(); ++rank) {
    checkTold(job.plan(), job.ranks()[rank], job.plan().fates[rank].stopped, texts);
  }
}

}  // namespace

TEST_WITHIN(whatAVerdictSaysWasSoWhoeverStopsDiesOrIsLate, 60) {
  Counts counts;
  if (const char* seed = std::getenv("TEST_SEED")) {
    checkJob(std::atoi(seed), counts);
    return;
  }
  for (unsigned seed = 1; seed <= (test::kSlow ? 30 : 200); ++seed) {
    std::fprintf(stderr, "\nTEST_SEED=%u", seed);  // a failure's line follows
    checkJob(seed, counts);
  }
  std::fprintf(stderr, "\n");
  CHECK(counts.verdicts > 0);
  CHECK(test::kSlow || counts.voids > 0);
}

TEST(anExtensionIsForTheOperationsIssuedBeforeIt) {
  Deadlines deadlines;
  const auto at = [](int ms) { return Plan::at(ms); };
  CHECK(!deadlines.passed(at(0), at(0), milliseconds(100), at(99)));
  CHECK(deadlines.passed(at(0), at(0), milliseconds(100), at(100)));
  CHECK(!deadlines.passed(at(0), at(50), milliseconds(100), at(100)));  // it began later
  CHECK(deadlines.extend(milliseconds(200), at(100)));
  CHECK(!deadlines.passed(at(0), at(0), milliseconds(100), at(299)));
  CHECK(deadlines.passed(at(101), at(101), milliseconds(100), at(299)));
  CHECK(!deadlines.extend(milliseconds(200), at(200)));  // the earlier one lasts
  CHECK(!deadlines.passed(at(101), at(101), milliseconds(100), at(399)));
  CHECK(deadlines.passed(at(0), at(0), milliseconds(100), at(400)));
}

TEST(timeInWhichAProcessIsStoppedDoesNotCountAsWaited) {
  RunningTime clock;
  const auto begun = clock.at(Plan::at(0));
  for (int ms = 50; ms <= 1000; ms += 50) clock.at(Plan::at(ms));
  CHECK(clock.at(Plan::at(1000)) - begun == milliseconds(1000));
  CHECK(clock.at(Plan::at(61'000)) - begun == milliseconds(1000) + RunningTime::kGap);
  CHECK(clock.at(Plan::at(60'000)) - begun == milliseconds(1000) + RunningTime::kGap);
}
