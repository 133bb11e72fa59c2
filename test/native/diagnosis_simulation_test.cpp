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
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "Check.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "diagnosis/hang/RunningTime.hpp"
#include "monitor/Deadlines.hpp"

using namespace torchcomms_pg;
using Clock = HangDiagnosis::Clock;
using std::chrono::milliseconds;

namespace {

constexpr uint64_t kSimulated = 1;
constexpr int kOps = 4;  // number of collectives that the ranks issue one after another
constexpr milliseconds kTimeout{1000};
constexpr milliseconds kEnd{40'000};  // of the simulation
constexpr Clock::time_point kNever = Clock::time_point::max();

// Time before a verdict within which what it says was so: a round's limit, and some steps.
constexpr milliseconds kFresh{5500};

// Time within which a rank that runs answers, if the store is fast: within a round's limit for the
// answers.
constexpr milliseconds kAnswers{2000};

// Time within which a rank that runs sees what is on the board, if it looks there in each step.
constexpr milliseconds kSeen{200};

constexpr const char* kOver = "the verdict is over";

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
  std::vector<Clock::time_point> arrives;  // when its program issues each collective
  Interval stopped;                        // until kNever if it has died
  Interval compiles;
  Interval relaxes;                   // has asked its peers to wait
  Clock::time_point breaks = kNever;  // when the store breaks for it
  milliseconds stopsWriting{0};       // for how long it is stopped before it writes a verdict
};

struct Plan {
  explicit Plan(unsigned seed) : random(seed) {
    size = pick(2, 4);
    goesOn = chance(50);
    ringMs = chance(30) ? 1000 : 0;
    slow = chance(30);
    breaks = chance(10);
    std::vector<int> firsts;  // when each arrives at the first collective
    for (int rank = 0; rank < size; ++rank) {
      auto& fate = fates.emplace_back();
      auto& first = firsts.emplace_back(chance(60) ? pick(0, 1000) : pick(1000, 12'000));
      if (chance(30)) {  // as it asks, and looks at the board
        fate.stopped.begin = at(first) + kTimeout + std::chrono::microseconds(pick(0, 150'000));
        fate.stopped.end = fate.stopped.begin + milliseconds(pick(50, 6000));
      } else if (chance(50)) {
        fate.stopped.begin = at(chance(70) ? pick(1000, 4500) : pick(0, 12'000));
        fate.stopped.end =
            chance(20) ? kNever
                       : fate.stopped.begin + milliseconds(pick(50, chance(50) ? 1000 : 9000));
      }
      if (fate.stopped.begin == kNever && chance(20)) {
        fate.stopsWriting = milliseconds(pick(1000, 9000));
      }
      if (chance(15)) fate.compiles = span(pick(0, 8000), pick(100, 6000));
      if (chance(15)) fate.relaxes = span(pick(0, 8000), pick(100, 6000));
      if (breaks) fate.breaks = at(pick(1000, 12'000));
    }
    auto begin = at(0);
    for (int op = 0; op < kOps; ++op) {
      auto last = begin;
      for (auto& fate : fates) {
        auto delay = milliseconds(chance(60) ? pick(0, 1000) : pick(1000, 12'000));
        if (op == 0) delay = milliseconds(firsts[&fate - fates.data()]);
        if (op == 0 && chance(10)) delay = std::chrono::duration_cast<milliseconds>(kEnd * 2);
        const auto arrives = begin == kNever ? kNever : begin + delay;
        fate.arrives.push_back(fate.stopped.has(arrives) ? fate.stopped.end : arrives);
        last = std::max(last, fate.arrives.back());
      }
      begin = last == kNever || chance(5) ? kNever : last + milliseconds(1);
      ends.push_back(begin);
    }
  }

  static Clock::time_point at(int ms) { return Clock::time_point(milliseconds(1'000'000 + ms)); }
  int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); }
  bool chance(int percent) { return pick(1, 100) <= percent; }
  static Interval span(int begin, int ms) { return {at(begin), at(begin + ms)}; }

  std::mt19937 random;
  int size = 0;
  bool goesOn = false;
  int ringMs = 0;       // how long a ring takes at most
  bool slow = false;    // the store takes up to a second now and then
  bool breaks = false;  // the store breaks for the ranks, one after another
  std::vector<Fate> fates;
  std::vector<Clock::time_point> ends;  // a moment after all have arrived, or never
};

// Time by which is written what all ranks that run have read at the end.
const auto kRead = Plan::at(0) + kEnd - milliseconds(3000);

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
      if (!ranks_[rank].broken) resume(static_cast<int>(rank));
      ranks_[rank].thread.join();
      ranks_[rank].diagnosis->close();
    }
  }

  struct Got {
    Clock::time_point asked;
    Clock::time_point time;
    int op;
    Verdict verdict;
  };
  struct Printed {
    std::string text;
    Clock::time_point time;
  };
  struct Rank {
    std::shared_ptr<HangDiagnosis> diagnosis;
    std::thread thread;
    Clock::time_point stepAt = kNever;  // when the thread goes on; kNever if nothing is due
    Clock::time_point monitorAt;
    std::optional<Clock::time_point> rungAt;  // when another rank's ring arrives
    bool waits = false;                       // for something to be due
    bool failed = false;
    bool broken = false;
    std::optional<int> subject;  // its operation that has a verdict
    std::optional<Clock::time_point> asked;
    int askedOn = 0;
    Clock::time_point settled{};
    std::vector<Got> got;
    std::vector<Printed> printed;
    Deadlines deadlines;
  };
  struct Written {
    std::string key;
    std::string text;
    Clock::time_point time;
    int rank;
  };

  const Plan& plan() const { return plan_; }
  const std::vector<Rank>& ranks() const { return ranks_; }
  // Returns what was written as leaders, verdicts, their readers and their ends.
  const std::vector<Written>& written() const { return written_; }

 private:
  struct Over {};
  enum : int { kScheduler = -1 };

  class Board : public SharedBoard {
   public:
    Board(Job& job, int rank) : job_(job), rank_(rank) {}
    void set(const std::string& key, const std::string& value) override {
      Call call(*this);
      job_.note(key, value, rank_);
      job_.values_[key] = value;
    }
    std::optional<std::string> get(const std::string& key) override {
      Call call(*this);
      const auto found = job_.values_.find(key);
      return found == job_.values_.end() ? std::nullopt : std::optional(found->second);
    }
    bool claim(const std::string& key, const std::string& value) override {
      auto& fate = job_.plan_.fates[rank_];
      if (fate.stopsWriting.count() > 0 && decodeVerdict(value)) {
        fate.stopped =
            Interval{job_.now_, job_.now_ + std::exchange(fate.stopsWriting, milliseconds(0))};
      }
      Call call(*this);
      const auto [entry, first] = job_.values_.emplace(key, value);
      if (first) job_.note(key, value, rank_);
      return entry->second == value;
    }
    int64_t add(const std::string& key, int64_t value) override {
      Call call(*this);
      auto& text = job_.values_[key];
      const auto sum = (text.empty() ? 0 : std::stoll(text)) + value;
      text = std::to_string(sum);
      if (value > 0) job_.note(key, "", rank_);
      return sum;
    }

   private:
    // The way of the call to the store, and of its answer.
    struct Call {
      explicit Call(Board& board) : board(board) { board.travel(); }
      ~Call() noexcept(false) {
        if (!board.job_.over_) board.travel();
      }
      Call(const Call&) = delete;
      Board& board;
    };
    void travel() {
      auto& plan = job_.plan_;
      const int most = plan.slow && plan.chance(3) ? 1'000'000 : 2000;
      job_.pause(rank_, job_.now_ + std::chrono::microseconds(plan.pick(50, most)));
      if (plan.fates[rank_].breaks <= job_.now_) {
        job_.ranks_[rank_].broken = true;
        throw std::runtime_error("connection reset");
      }
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
    if (plan_.ringMs > 0) {
      options.slack = [] { return milliseconds(0); };
    }
    options.goesOn = plan_.goesOn;
    options.print = [this, rank](const std::string& text) {
      ranks_[rank].printed.push_back({text, now_});
    };
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
      while (!over_ && !self.broken) {
        const auto due = self.diagnosis->due(now_);
        self.waits = due != now_ + milliseconds(20);  // which is a round's next step
        pause(rank, due.value_or(kNever));
        self.waits = false;
        self.diagnosis->step(now_);
      }
    } catch (const Over&) {
    }
    self.stepAt = kNever;
    self.waits = false;
    std::lock_guard lock(mutex_);
    running_ = kScheduler;
    changed_.notify_all();
  }

  void note(const std::string& key, const std::string& value, int rank) {
    if (key.find("answer") == std::string::npos) written_.push_back({key, value, now_, rank});
  }

  // Returns the number of collectives that the rank has issued, and of those that have ended.
  int issued(int rank) const {
    const auto& all = plan_.fates[rank].arrives;
    return static_cast<int>(std::ranges::count_if(all, [&](auto time) { return time <= now_; }));
  }
  int ended() const {
    return static_cast<int>(
        std::ranges::count_if(plan_.ends, [&](auto time) { return time <= now_; }));
  }

  static int64_t ms(Clock::duration time) {
    return std::chrono::duration_cast<milliseconds>(time).count();
  }
  static std::string name(int op) { return "all_reduce #" + std::to_string(op) + " (8 x Float)"; }

  static Wait wait(int op, int size) {
    Wait wait;
    wait.text = name(op);
    wait.group = kSimulated;
    wait.members = {{0, 1, static_cast<uint64_t>(size)}};
    wait.collectives = {{static_cast<uint64_t>(op), -1}};
    return wait;
  }

  // Does what the monitor does for a communicator, and for a watched group.
  void check(int rank) {
    auto& self = ranks_[rank];
    auto& diagnosis = *self.diagnosis;
    if (diagnosis.takeRing()) {
      for (int other = 0; other < plan_.size; ++other) {
        auto& rung = ranks_[other].rungAt;
        const auto at = now_ + milliseconds(plan_.pick(0, plan_.ringMs));
        if (other != rank) rung = std::min(rung.value_or(at), at);
      }
    }
    if (self.rungAt && *self.rungAt <= now_) {
      self.rungAt.reset();
      diagnosis.notice();
    }
    if (diagnosis.wantsStatus()) {
      HangDiagnosis::Snapshot snapshot;
      auto& answer = snapshot.answer;
      answer.rank = rank;
      const auto seq = static_cast<uint64_t>(issued(rank));
      answer.counts = {{kSimulated, seq, 0, {}}};
      if (issued(rank) > ended()) {
        answer.current = name(issued(rank));
        answer.currentSeq = seq;
        answer.signature = "all_reduce Float";
        answer.waits = {wait(issued(rank), plan_.size)};
      }
      const auto& fate = plan_.fates[rank];
      if (fate.compiles.has(now_)) answer.compilingMs = ms(now_ - fate.compiles.begin);
      if (fate.compiles.end <= now_) answer.compiledMs = ms(now_ - fate.compiles.end);
      if (fate.relaxes.has(now_)) answer.relaxedMs = ms(fate.relaxes.end - now_);
      diagnosis.answer(std::move(snapshot));
    }
    if (self.subject && *self.subject <= ended()) {
      self.subject.reset();
      diagnosis.end(kOver);
    }
    const auto standing = diagnosis.standing();
    self.settled = standing ? standing->since : self.subject ? self.settled : Clock::time_point{};
    const int op = issued(rank);
    if (!self.failed && !self.asked && op > ended()) {
      const auto issue = plan_.fates[rank].arrives[op - 1];
      if (issue >= self.settled && self.deadlines.passed(issue, issue, kTimeout, now_)) {
        self.asked = now_;
        self.askedOn = op;
      }
    }
    if (self.asked) {
      DiagnosisRequest request;
      request.rank = rank;
      request.group = "g";
      request.size = plan_.size;
      request.op = name(self.askedOn);
      request.signature = "all_reduce Float";
      request.seq = self.askedOn;
      request.wait = wait(self.askedOn, plan_.size);
      request.timeoutMs = kTimeout.count();
      const auto issue = plan_.fates[rank].arrives[self.askedOn - 1];
      request.waitedMs = ms(now_ - issue);
      request.compileLeftMs = std::max<int64_t>(0, 3000 - request.waitedMs);
      request.ended = self.askedOn <= ended();
      if (const auto verdict = diagnosis.ask(request, now_)) {
        self.got.push_back({*self.asked, now_, self.askedOn, *verdict});
        self.asked.reset();
        if (verdict->extensionMs > 0) {
          self.deadlines.extend(milliseconds(verdict->extensionMs), now_);
        } else if (plan_.goesOn) {
          // As in WatchedGroup: the verdict may be about another operation.
          if (isSameOperation(verdict->about, request.wait)) self.subject = self.askedOn;
          self.settled = now_;
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

// Returns the ranks that the text's first line names before `what`: "ranks 1, 2 did not answer".
std::vector<int> namedBefore(const std::string& text, const std::string& what) {
  std::vector<int> ranks;
  const auto end = text.substr(0, text.find('\n')).find(what);
  if (end == std::string::npos) return ranks;
  const auto begin = text.rfind("rank", end);
  for (auto at = begin; at < end; ++at) {
    if (text[at] >= '0' && text[at] <= '9') ranks.push_back(text[at] - '0');
  }
  return ranks;
}

// A round of the diagnoses, by what was written on the board.
struct Round {
  Clock::time_point begun;           // when a rank became its leader
  Clock::time_point ended = kNever;  // when its verdict was written
  Clock::time_point over = kNever;   // when its verdict was ended
  std::vector<Clock::time_point> reads;
  int leader = -1;
  Verdict verdict;
};

bool runs(const Plan& plan, int rank, Clock::time_point from, Clock::time_point to) {
  return !plan.fates[rank].stopped.overlaps(from, to);
}

bool allRun(const Plan& plan, Clock::time_point from, Clock::time_point to) {
  for (int rank = 0; rank < plan.size; ++rank) {
    if (!runs(plan, rank, from, to)) return false;
  }
  return !plan.slow && !plan.breaks;
}

int operationOf(const Verdict& verdict) {
  return static_cast<int>(verdict.about.collectives.back().seq);
}

// Checks that what the verdict says was so when the ranks answered.
void checkTrue(const Plan& plan, const Round& round) {
  const auto& text = round.verdict.text;
  const auto from = std::max(round.begun, round.ended - kFresh);
  if (round.verdict.extensionMs > 0) return;
  const int op = operationOf(round.verdict);
  const bool silent = text.find("did not answer") != std::string::npos;
  for (const int rank : round.verdict.ranks) {
    const auto& fate = plan.fates[rank];
    const bool quiet = silent && (plan.slow || plan.breaks);
    CHECK(fate.arrives[op - 1] > from || !runs(plan, rank, from, round.ended) || quiet);
  }
  if (!plan.slow && !plan.breaks) {  // only who was stopped does not answer
    for (const int rank : namedBefore(text, " did not answer")) {
      CHECK(!runs(plan, rank, round.begun, round.ended));
    }
  }
  if (text.find("all ranks have arrived") != std::string::npos) {
    for (const auto& fate : plan.fates) CHECK(fate.arrives[op - 1] <= round.ended);
    CHECK(plan.ends[op - 1] > from);
    CHECK(plan.ends[op - 1] > round.ended - kSeen || !allRun(plan, from, round.ended));
  } else {
    CHECK(!round.verdict.ranks.empty());
  }
}

// Checks that whoever led to the verdict ends it.
void checkEnded(const Plan& plan, const Round& round) {
  const auto end = plan.ends[operationOf(round.verdict) - 1];
  const auto known = end == kNever ? kNever : std::max(end, round.ended) + kAnswers;
  if (known < kRead && runs(plan, round.leader, round.begun, known) && !plan.slow && !plan.breaks) {
    CHECK(round.over <= known);
  }
}

// Returns whether the rank prints `text` for the round's verdict: its leader all of it, the others
// where to read it.
bool isPrintOf(const Round& round, int rank, const std::string& text) {
  return text == (rank == round.leader ? round.verdict.text : printedElsewhere(round.verdict));
}

// Checks what a rank was told, and when. `rounds`: those with verdicts, in their order.
void checkTold(const Plan& plan, const Job& job, int number, const std::vector<Round>& rounds) {
  const auto& rank = job.ranks()[number];
  const auto& fate = plan.fates[number];
  const auto& stopped = fate.stopped;
  const auto find = [&](const std::string& text, auto from) {
    return std::find_if(
        from, rounds.end(), [&](const Round& round) { return round.verdict.text == text; });
  };
  for (const auto& got : rank.got) {
    auto took = got.time - got.asked;
    if (stopped.overlaps(got.asked, got.time)) {
      took -= stopped.end - std::max(stopped.begin, got.asked);
    }
    CHECK(took <= HangDiagnosis::kLimit + milliseconds(500));
    if (fate.breaks <= got.time) continue;  // it may be the only one that knows its verdict
    if (saysUnknown(got.verdict.text)) {
      CHECK(plan.slow);
      continue;
    }
    const auto round = find(got.verdict.text, rounds.begin());
    CHECK(round != rounds.end());
    CHECK(got.verdict.extensionMs == 0 || operationOf(got.verdict) == got.op);
    if (rounds.size() == 1 && allRun(plan, round->begun, got.time)) {  // all have read it
      const auto reads = std::ranges::count_if(
          round->reads, [&](Clock::time_point time) { return time <= got.time; });
      CHECK(reads >= plan.size);
    }
  }
  const bool lives = stopped.end != kNever || stopped.begin == kNever;
  const auto end = Plan::at(0) + kEnd - HangDiagnosis::kLimit - milliseconds(500);
  CHECK(!lives || !rank.asked || *rank.asked > end);  // is kept waiting
  auto next = rounds.begin();
  int finals = 0;
  for (const auto& [text, time] : rank.printed) {
    if (text == kOver || saysUnknown(text) || fate.breaks <= time) continue;
    next = std::find_if(next, rounds.end(), [&](const Round& round) {
      return isPrintOf(round, number, text);
    });  // all print the verdicts in one order, once each
    CHECK(next != rounds.end());
    CHECK(plan.slow || next->over == kNever || time <= next->over + kSeen);
    ++next;
    ++finals;
  }
  CHECK(plan.goesOn || plan.slow || finals <= 1);  // with which the group fails
}

// Checks that a rank that was never stopped has printed all verdicts, and their ends.
void checkPrinted(const Job& job, int number, const std::vector<Round>& rounds) {
  const auto printed = [&](const auto& isIt) {
    return std::ranges::count_if(job.ranks()[number].printed, isIt, &Job::Printed::text);
  };
  int ends = 0;
  for (const auto& round : rounds) {
    if (round.ended < kRead && round.verdict.extensionMs == 0) {
      CHECK_EQUAL(
          printed([&](const std::string& text) { return isPrintOf(round, number, text); }), 1);
    }
    ends += round.over < kRead ? 1 : 0;
  }
  CHECK(printed([](const std::string& text) { return text == kOver; }) >= ends);
}

struct Counts {
  int verdicts = 0;
  int voids = 0;
  int extensions = 0;
  int ends = 0;
};

std::vector<Round> roundsOf(const Job& job, Counts& counts) {
  std::map<int, Round> rounds;
  for (const auto& written : job.written()) {
    auto& round = rounds[std::atoi(written.key.c_str())];
    if (written.key.ends_with("leader")) {
      round.begun = written.time;
    } else if (written.key.ends_with("read")) {
      round.reads.push_back(written.time);
    } else if (written.key.ends_with("over")) {
      CHECK(round.over == kNever);  // one rank has led to the verdict
      CHECK_EQUAL(written.rank, round.leader);
      round.over = written.time;
      ++counts.ends;
    } else if (const auto verdict = decodeVerdict(written.text)) {
      round.leader = written.rank;
      round.verdict = *verdict;
      round.ended = written.time;
      ++counts.verdicts;
      counts.extensions += verdict->extensionMs > 0 ? 1 : 0;
    } else {
      ++counts.voids;
    }
  }
  std::vector<Round> judged;
  for (auto& [number, round] : rounds) {
    if (round.leader >= 0) judged.push_back(std::move(round));
  }
  return judged;
}

void checkJob(unsigned seed, Counts& counts) {
  Job job(seed);
  job.run();
  const auto& plan = job.plan();
  const auto rounds = roundsOf(job, counts);
  for (const auto& round : rounds) {
    checkTrue(plan, round);
    if (plan.goesOn && round.verdict.extensionMs == 0) checkEnded(plan, round);
  }
  for (int rank = 0; rank < plan.size; ++rank) {
    const bool stops = plan.fates[rank].stopped.begin != kNever;
    checkTold(plan, job, rank, rounds);
    if (!stops && !plan.slow && !plan.breaks) checkPrinted(job, rank, rounds);
  }
}

}  // namespace

TEST_WITHIN(whatAVerdictSaysWasSoWhoeverStopsDiesOrIsLate, 90) {
  Counts counts;
  if (const char* seed = std::getenv("TEST_SEED")) {
    checkJob(std::atoi(seed), counts);
    return;
  }
  // Jobs in which a leader writes a verdict on old answers unless a rank that has not asked
  // declares the round void; then a sample.
  std::vector<unsigned> seeds = {1081, 1905, 1916};
  for (unsigned seed = 1; seed <= (test::kSlow ? 20 : 200); ++seed) seeds.push_back(seed);
  for (const unsigned seed : seeds) {
    std::fprintf(stderr, "\nTEST_SEED=%u", seed);  // a failure's line follows
    checkJob(seed, counts);
  }
  std::fprintf(stderr, "\n");
  CHECK(counts.verdicts > 0);
  CHECK(test::kSlow || counts.voids > 0);
  CHECK(test::kSlow || counts.extensions > 0);
  CHECK(test::kSlow || counts.ends > 0);
  if (!test::kSlow) {
    CHECK_PASSED(leaderWasStopped);
    CHECK_PASSED(anotherVerdictWasFirst);
    CHECK_PASSED(answersOfDifferentTimes);
    CHECK_PASSED(verdictEndedBeforeItsRead);
  }
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
  RunningTime clock(milliseconds(200));
  const auto begun = clock.at(Plan::at(0));
  for (int ms = 50; ms <= 1000; ms += 50) clock.at(Plan::at(ms));
  CHECK(clock.at(Plan::at(1000)) - begun == milliseconds(1000));
  CHECK(clock.at(Plan::at(61'000)) - begun == milliseconds(1000) + milliseconds(200));
  CHECK(clock.at(Plan::at(60'000)) - begun == milliseconds(1000) + milliseconds(200));
}
