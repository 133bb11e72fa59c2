// Diagnoses: ranks find out together which of them holds up an operation.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "Check.hpp"
#include "FullPipe.hpp"
#include "Locales.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "diagnosis/hang/PartingQuestion.hpp"
#include "diagnosis/hang/RankWords.hpp"
#include "monitor/Compiling.hpp"
#include "monitor/Printer.hpp"

using namespace torchcomms_pg;
using Clock = HangDiagnosis::Clock;
using std::chrono::milliseconds;

namespace {

struct Memory {
  std::mutex mutex;
  std::condition_variable healed;
  std::map<std::string, std::string> values;
  bool broken = false;
  bool hangs = false;
};

class MemoryBoard : public SharedBoard {
 public:
  explicit MemoryBoard(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}
  void set(const std::string& key, const std::string& value) override {
    const auto lock = use();
    memory_->values[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    const auto lock = use();
    const auto found = memory_->values.find(key);
    return found == memory_->values.end() ? std::nullopt : std::optional(found->second);
  }
  bool claim(const std::string& key, const std::string& value) override {
    const auto lock = use();
    return memory_->values.emplace(key, value).second;
  }
  int64_t add(const std::string& key, int64_t value) override {
    const auto lock = use();
    auto& text = memory_->values[key];
    const auto sum = (text.empty() ? 0 : std::stoll(text)) + value;
    text = std::to_string(sum);
    return sum;
  }

 private:
  std::unique_lock<std::mutex> use() {
    std::unique_lock lock(memory_->mutex);
    memory_->healed.wait(lock, [&] { return !memory_->hangs; });
    if (memory_->broken) throw std::runtime_error("connection refused");
    return lock;
  }
  std::shared_ptr<Memory> memory_;
};

constexpr uint64_t kGroup = 1;

// A collective of the group that the ranks `members` wait in.
Wait waitIn(const std::string& text, uint64_t seq, const std::vector<int64_t>& members) {
  Wait wait;
  wait.text = text;
  wait.group = kGroup;
  wait.members = runsOf(members);
  wait.collectives = {{seq, -1}};
  return wait;
}

std::vector<int64_t> ranksTo(int size) {
  std::vector<int64_t> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

// Notes how many collectives of the group the rank has issued.
void issue(RankStatus& status, uint64_t collectives) {
  status.counts = {{kGroup, collectives, 0, {}}};
}

// What ranks were asked to do. Outlives the group, since their threads end some time after close().
struct Asked {
  explicit Asked(int size) : dumps(size), looks(size) {}
  std::vector<std::atomic<int>> dumps;  // how often each was asked for one
  std::vector<std::atomic<int>> looks;  // how often each has looked for the library's news
};

// The ranks of one group, with the thread that is their monitors.
class Group {
 public:
  // Makes the group. `goesOn`: it goes on after a verdict.
  explicit Group(int size, bool goesOn = false)
      : answers(size), answering(size, true), asked(std::make_shared<Asked>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      answers[rank].rank = rank;
      issue(answers[rank], 0);
      HangDiagnosis::Options options;
      options.rank = rank;
      options.number = std::to_string(rank);
      options.ranks.resize(size);
      std::iota(options.ranks.begin(), options.ranks.end(), 0);
      options.look = [asked = asked, rank] { ++asked->looks[rank]; };
      options.dump = [asked = asked, rank] { ++asked->dumps[rank]; };
      options.goesOn = goesOn;
      options.describeSilent = [](int silent) {
        return Silent{"is silent (pid " + std::to_string(silent) + ")"};
      };
      ranks.push_back(HangDiagnosis::open(std::make_unique<MemoryBoard>(memory), options));
    }
    monitor_ = std::thread([this] {
      while (!stop_) {
        std::this_thread::sleep_for(milliseconds(5));
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
          if (ranks[rank]->takeRing()) {
            for (const auto& other : ranks) other->notice();
          }
          // Keeps this order: a test writes what it wants answered before it asks.
          if (ranks[rank]->wantsStatus() && answering[rank]) {
            ranks[rank]->answer({answers[rank], nullptr});
          }
        }
      }
    });
  }
  ~Group() {
    stop_ = true;
    monitor_.join();
    for (const auto& rank : ranks) rank->close();
  }

  // Asks as the monitor does: again and again.
  Verdict ask(int rank, const DiagnosisRequest& request) {
    for (;;) {
      if (const auto verdict = ranks[rank]->ask(request, Clock::now())) return *verdict;
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  std::shared_ptr<Memory> memory = std::make_shared<Memory>();
  std::vector<RankStatus> answers;
  std::vector<bool> answering;
  std::shared_ptr<Asked> asked;
  std::vector<std::shared_ptr<HangDiagnosis>> ranks;

 private:
  std::atomic<bool> stop_{false};
  std::thread monitor_;
};

DiagnosisRequest questionOn(int size, int rank = 0) {
  DiagnosisRequest request;
  request.rank = rank;
  request.group = "g";
  request.size = size;
  request.op = "all_reduce #3 (8 x Float)";
  request.signature = "all_reduce Float";
  request.seq = 3;
  request.wait = waitIn(request.op, 3, ranksTo(size));
  request.timeoutMs = 1000;
  request.compileLeftMs = 5000;
  return request;
}

std::string ranksOf(const Verdict& verdict) {
  std::string text;
  for (const int rank : verdict.ranks) text += std::to_string(rank) + " ";
  return text;
}

}  // namespace

TEST(twoRanksAloneAreAskedWhereTheyPartedAndEachReaderOfTheVerdictIsToldTheSame) {
  // Shared with the thread that asks a silent rank, which outlives this test.
  struct Questions {
    std::mutex mutex;
    std::vector<std::string> asked;
    std::atomic<bool> silent = false;
  };
  const auto questions = std::make_shared<Questions>();
  // Python's part: the last step returns the result.
  PartingQuestion::setSource([questions](const PartingQuestion::Asked& question) -> std::string {
    std::string text = question.step + " " + question.group + " " +
                       std::to_string(question.number) + " on " + std::to_string(question.rank);
    for (const auto& each : question.texts) text += "|" + each;
    {
      std::lock_guard lock(questions->mutex);
      questions->asked.push_back(text);
    }
    if (question.step == "tell" && questions->silent)
      std::this_thread::sleep_for(std::chrono::seconds(3));
    if (question.step == "conclude") {
      return "[[\"a.py\", 7, \"f\", \"if x:\"]]\nthe ranks parted at a.py:7\n  now x";
    }
    return question.step;
  });
  for (const bool isSilent : {false, true}) {
    questions->silent = isSilent;
    Group group(3);
    for (int rank : {0, 2}) issue(group.answers[rank], 3);
    issue(group.answers[1], 2);
    for (int rank : {0, 2}) {
      group.answers[rank].current = "all_reduce #3 (8 x Float)";
      group.answers[rank].currentSeq = 3;
      group.answers[rank].signature = "all_reduce Float";
    }
    const auto begun = Clock::now();
    const auto verdict = group.ask(0, questionOn(3));
    CHECK_EQUAL(ranksOf(verdict), "1 ");
    CHECK_EQUAL(group.ranks[1]->awaitOthers().value().text, verdict.text);
    if (isSilent) {
      CHECK(Clock::now() - begun < milliseconds(2900));
      CHECK_EQUAL(verdict.parting, "");
      break;
    }
    CHECK_CONTAINS(verdict.text, "\n  the ranks parted at a.py:7\n    now x\n  rank 1: ");
    CHECK_EQUAL(group.ranks[1]->awaitOthers().value().parting, verdict.parting);
    std::lock_guard lock(questions->mutex);
    const std::vector<std::string> wanted{
        "tell g 3 on 1|", "compare g 3 on 0|tell|rank 0|rank 0|rank 1|rank 1",
        "read g 3 on 1|compare", "conclude g 3 on 0|read"};
    CHECK(questions->asked == wanted);
  }
  PartingQuestion::setSource(nullptr);
}

TEST(of256RanksTwoAloneAreAskedWhereTheyParted) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || defined(EMULATED)
  constexpr int kRanks = 32;  // their threads share few slow cores
#else
  constexpr int kRanks = 256;
#endif
  constexpr int kLate = 10;
  struct Questions {
    std::mutex mutex;
    std::vector<int64_t> ranks;
  };
  const auto questions = std::make_shared<Questions>();
  PartingQuestion::setSource([questions](const PartingQuestion::Asked& question) -> std::string {
    std::lock_guard lock(questions->mutex);
    questions->ranks.push_back(question.rank);
    return question.step == "conclude" ? "[]\nthe ranks parted at a.py:7" : question.step;
  });
  // A verdict does not wait longer than 1.9 s, and is without it if the ranks have had no core.
  for (int left = 10; left > 0; --left) {
    Group group(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      const bool late = rank == kLate;
      issue(group.answers[rank], late ? 2 : 3);
      if (late) continue;
      group.answers[rank].current = "all_reduce #3 (8 x Float)";
      group.answers[rank].currentSeq = 3;
      group.answers[rank].signature = "all_reduce Float";
    }
    const auto begun = Clock::now();
    const auto verdict = group.ask(0, questionOn(kRanks));
    std::printf("%.2f s ", std::chrono::duration<double>(Clock::now() - begun).count());
    std::lock_guard lock(questions->mutex);
    for (const auto rank : questions->ranks) CHECK(rank == 0 || rank == kLate);
    if (verdict.parting.empty() && left > 1) {
      questions->ranks.clear();
      continue;
    }
    CHECK_EQUAL(ranksOf(verdict), "10 ");
    CHECK_EQUAL(verdict.parting, "[]\nthe ranks parted at a.py:7");
    CHECK_EQUAL(questions->ranks.size(), size_t{4});
    break;
  }
  PartingQuestion::setSource(nullptr);
}

TEST(theRankThatHasNotIssuedTheOperationIsNamedToAllWhoAsk) {
  Group group(3);
  for (int rank : {0, 2}) issue(group.answers[rank], 3);
  issue(group.answers[1], 2);
  group.answers[1].completed.text = "all_reduce #2 (4 x Float)";
  Verdict other;
  std::thread asksToo([&] { other = group.ask(2, questionOn(3, 2)); });
  const auto verdict = group.ask(0, questionOn(3));
  asksToo.join();
  CHECK_EQUAL(ranksOf(verdict), "1 ");
  CHECK_EQUAL(verdict.text, other.text);
  CHECK_CONTAINS(verdict.text, "rank 1 has not arrived at all_reduce #3 (8 x Float)");
  CHECK_CONTAINS(verdict.text, "rank 1: last completed all_reduce #2 (4 x Float)");
  // A rank that the failure reaches later gets the same.
  CHECK_EQUAL(group.ranks[1]->awaitOthers().value().text, verdict.text);
}

TEST(aGroupThatGoesOnIsToldWhenAVerdictIsOverAndGetsTheNext) {
  Group group(3, /*goesOn=*/true);
  for (int rank : {0, 2}) issue(group.answers[rank], 3);
  issue(group.answers[1], 2);
  const auto stand = [&](bool wanted) {
    const auto until = Clock::now() + milliseconds(20'000);
    for (const auto& rank : group.ranks) {
      while (rank->standing().has_value() != wanted) {
        if (Clock::now() > until) return false;
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
    return true;
  };
  CHECK(stand(false));
  CHECK_EQUAL(ranksOf(group.ask(0, questionOn(3))), "1 ");
  CHECK(stand(true));
  group.ranks[2]->end("it has not led");
  std::this_thread::yield();
  CHECK(group.ranks[0]->standing().has_value());
  CHECK(awaitPrinted(std::chrono::seconds(20)));  // the verdicts, not into the file
  const int printed = memfd_create("stderr", 0);
  const int before = dup(STDERR_FILENO);
  dup2(printed, STDERR_FILENO);
  group.ranks[0]->end("it is over");
  CHECK(stand(false));
  CHECK(awaitPrinted(std::chrono::seconds(20)));
  dup2(before, STDERR_FILENO);
  char text[512] = {};
  CHECK(pread(printed, text, sizeof text - 1, 0) > 0);
  close(before);
  close(printed);
  for (const auto* rank : {"[rank 0]", "[rank 1]", "[rank 2]"}) {
    CHECK_CONTAINS(std::string(text), rank + std::string(" torchcomms_pg: it is over"));
  }
  issue(group.answers[1], 4);
  issue(group.answers[2], 3);
  auto next = questionOn(3, 1);
  next.op = "broadcast #4 (8 x Float, root 0)";
  next.seq = 4;
  next.wait = waitIn(next.op, 4, ranksTo(3));
  const auto verdict = group.ask(1, next);
  CHECK_EQUAL(ranksOf(verdict), "0 2 ");
  CHECK_CONTAINS(verdict.text, "have not arrived at broadcast #4");
  CHECK(stand(true));
}

TEST(aVerdictTakesThePlaceOfTheOneThatItsLeaderLedToBefore) {
  Group group(3, /*goesOn=*/true);
  for (auto& answer : group.answers) issue(answer, 4);
  issue(group.answers[1], 2);
  CHECK_EQUAL(ranksOf(group.ask(0, questionOn(3))), "1 ");
  auto next = questionOn(3);
  next.op = "broadcast #4 (8 x Float, root 0)";
  next.seq = 4;
  next.wait = waitIn(next.op, 4, ranksTo(3));
  CHECK_EQUAL(ranksOf(group.ask(0, next)), "1 ");
  const auto none = [&] {
    return std::ranges::none_of(
        group.ranks, [](const auto& rank) { return rank->standing().has_value(); });
  };
  group.ranks[0]->end("it is over");
  const auto until = Clock::now() + milliseconds(20'000);
  while (!none() && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  CHECK(none());
}

TEST(anOperationWhoseEndNobodyHearsIsNoHangOnceAllHaveCome) {
  auto request = questionOn(2);
  request.mayHaveEnded = true;
  std::map<int, RankStatus> answers;
  for (int rank : {0, 1}) {
    answers[rank].rank = rank;
    issue(answers[rank], 3);
  }
  CHECK(judge(request, answers, {}).extensionMs == 1000);
  issue(answers[1], 2);
  CHECK_EQUAL(ranksOf(judge(request, answers, {})), "1 ");
}

TEST(aMissingRankThatMayGoOnIsNotSaidToWait) {
  std::map<int, RankStatus> answers;
  for (int rank : {0, 1}) {
    answers[rank].rank = rank;
    issue(answers[rank], rank == 0 ? 3 : 2);
  }
  answers[1].waits = {waitIn("all_reduce #2 (8 x Float)", 2, ranksTo(2))};
  CHECK_CONTAINS(judge(questionOn(2), answers, {}).text, "and waits elsewhere");
  answers[1].waits.front().indirect = true;
  CHECK_CONTAINS(judge(questionOn(2), answers, {}).text, "and may wait elsewhere");
}

TEST(whoseFailureNobodyAskedAboutIsNotKeptWaiting) {
  Group group(2);
  const auto begun = Clock::now();
  CHECK(!group.ranks[0]->awaitOthers());
  CHECK(Clock::now() - begun < milliseconds(500));
}

TEST(ranksInDifferentOperationsOfOneNumberDisagreeWhateverTheirSizes) {
  Group group(3);
  for (auto& answer : group.answers) {
    issue(answer, 3);
    answer.currentSeq = 3;
    answer.current = "all_reduce #3 (8 x Float)";
    answer.stand = Stand::inCall;
    answer.signature = "all_reduce Float";
  }
  group.answers[2].current = "all_reduce #3 (9 x Float)";  // as of an uneven gather
  CHECK_CONTAINS(group.ask(0, questionOn(3)).text, "all ranks have arrived");
  Group second(3);
  second.answers = group.answers;
  second.answers[1].current = "broadcast #3 (8 x Float, root 1)";
  second.answers[1].signature = "broadcast Float root 1";
  const auto verdict = second.ask(0, questionOn(3));
  CHECK_EQUAL(ranksOf(verdict), "1 ");
  CHECK_CONTAINS(verdict.text, "its ranks call different operations");
  CHECK_CONTAINS(verdict.text, "rank 1: in broadcast #3 (8 x Float, root 1)");
}

TEST(aRankThatDoesNotAnswerIsDescribedByWhatItLeft) {
  Group group(3);
  for (auto& answer : group.answers) issue(answer, 3);
  group.answering[1] = false;
  const auto begun = Clock::now();
  const auto verdict = group.ask(0, questionOn(3));
  CHECK(Clock::now() - begun < milliseconds(10'000));  // 2.5 s, and a machine may be busy
  CHECK_EQUAL(ranksOf(verdict), "1 ");
  CHECK_CONTAINS(verdict.text, "rank 1: is silent (pid 1)");
}

TEST(aRankThatDoesNotAnswerIsNotCalledLate) {
  auto request = questionOn(3);
  const auto answer = [](int rank, uint64_t issued) {
    RankStatus answer;
    answer.rank = rank;
    issue(answer, issued);
    return answer;
  };
  std::map<int, RankStatus> answers = {{0, answer(0, 3)}, {2, answer(2, 3)}};
  const auto text = [&] { return judge(request, answers, {}).text; };
  CHECK_CONTAINS(
      text(),
      "rank 1 did not answer, so that nobody knows whether it has arrived at all_reduce #3");
  issue(answers[2], 2);
  CHECK_CONTAINS(text(), "rank 2 has not arrived at all_reduce #3 (8 x Float), issued 0 ms ago;");
  CHECK_CONTAINS(text(), "; rank 1 did not answer\n");
  // Shared memory shows who has not come, whether it answers or not.
  request.absent = {1, 2};
  request.absentIsAll = true;
  CHECK_CONTAINS(text(), "ranks 1, 2 have not arrived at all_reduce #3");
}

TEST(aVerdictIsPrintedAlsoWhereTheBoardHadBrokenBefore) {
  Group group(2);
  {
    std::lock_guard lock(group.memory->mutex);
    group.memory->broken = true;
  }
  for (int i = 0; i < 5; ++i) group.ranks[0]->awaitOthers();  // returns once it has looked
  const int printed = memfd_create("stderr", 0);
  const int before = dup(STDERR_FILENO);
  dup2(printed, STDERR_FILENO);
  const auto verdict = group.ranks[0]->ask(questionOn(2), Clock::now());
  CHECK(awaitPrinted(std::chrono::seconds(20)));
  dup2(before, STDERR_FILENO);
  char text[512] = {};
  CHECK(pread(printed, text, sizeof text - 1, 0) > 0);
  close(before);
  close(printed);
  CHECK(verdict.has_value());
  CHECK_CONTAINS(std::string(text), "it cannot be known");
}

TEST(aBoardThatHangsOrBreaksIsNotWaitedFor) {
  for (const bool hangs : {true, false}) {
    Group group(2);
    {
      std::lock_guard lock(group.memory->mutex);
      (hangs ? group.memory->hangs : group.memory->broken) = true;
    }
    const auto begun = Clock::now();
    const auto verdict = group.ask(0, questionOn(2));
    CHECK(Clock::now() - begun < milliseconds(10'000));  // 4 s, and a machine may be busy
    CHECK_CONTAINS(verdict.text, "it cannot be known");
    const auto known = Clock::now();
    group.ranks[0]->awaitOthers();
    CHECK(Clock::now() - known < milliseconds(3000));  // not as long once more
    CHECK_CONTAINS(verdict.text, hangs ? "has not answered for 4 s" : "connection refused");
    {
      std::lock_guard lock(group.memory->mutex);
      group.memory->hangs = false;
    }
    group.memory->healed.notify_all();
  }
}

TEST(dumpsAreAskedOfAllOtherRanksOnce) {
  Group group(3);
  for (int turn = 1; turn <= 2; ++turn) {
    group.ranks[1]->askForDumps();
    for (const auto& rank : group.ranks) {
      rank->notice();  // as they do upon a ring
    }
    const auto until = Clock::now() + milliseconds(20000);
    while ((group.asked->dumps[0] < turn || group.asked->dumps[2] < turn) && Clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    CHECK(group.asked->dumps[0] == turn);
    CHECK(group.asked->dumps[2] == turn);
  }
  CHECK(group.asked->dumps[1] == 0);
}

TEST(aRankLooksForTheLibrarysNewsOnlyWhenItIsRung) {
  Group group(2);
  group.ranks[0]->notice();
  while (group.asked->looks[0] == 0) std::this_thread::sleep_for(milliseconds(5));
  CHECK(!group.ranks[1]->due(Clock::now()));
  CHECK(group.asked->looks[1] == 0);
}

TEST(aRoundWaitsLongerForAnswersIfRingsMayBeLater) {
  const auto took = [](milliseconds slack) {
    DiagnosisProtocol::Options options;
    options.number = "0";
    options.ranks = {0, 1};
    options.describeSilent = [](int) { return Silent{"did not answer"}; };
    options.slack = [slack] { return slack; };
    DiagnosisProtocol protocol(
        std::make_unique<MemoryBoard>(std::make_shared<Memory>()), std::move(options));
    const Clock::time_point begun(std::chrono::hours(1));
    for (auto now = begun;; now += milliseconds(20)) {
      DiagnosisProtocol::Wanted wanted;
      wanted.request.emplace();
      wanted.request->wait = waitIn("all_reduce #1", 1, {0, 1});
      if (protocol.wantsStatus()) {
        wanted.status.emplace();
        issue(wanted.status->answer, 1);
      }
      if (protocol.step(std::move(wanted), now).ended) {
        return now - begun;
      }
    }
  };
  CHECK(took(milliseconds(0)) >= milliseconds(2500) && took(milliseconds(0)) < milliseconds(3000));
  CHECK_EQUAL(
      (took(milliseconds(1500)) - took(milliseconds(0))).count(),
      Clock::duration(milliseconds(1500)).count());
}

TEST(aLeaderThatVanishesIsReplaced) {
  Group group(2);
  group.memory->values["0/leader"] = "1";  // and nothing more of it
  issue(group.answers[0], 3);
  issue(group.answers[1], 2);
  group.answering[1] = false;
  CHECK_EQUAL(ranksOf(group.ask(0, questionOn(2))), "1 ");
  CHECK_PASSED(leaderVanished);
}

TEST(aCompilingRankExtendsTheTimeoutUpToALimit) {
  Group group(2);
  issue(group.answers[0], 3);
  issue(group.answers[1], 2);
  group.answers[1].compilingMs = 2500;
  auto request = questionOn(2);
  const auto first = group.ask(0, request);
  CHECK_EQUAL(first.extensionMs, 1000);
  CHECK_CONTAINS(first.text, "rank 1 has been compiling for 2.5 s");
  request.compileLeftMs = 300;
  CHECK_EQUAL(group.ask(0, request).extensionMs, 300);
  request.compileLeftMs = -1;
  const auto last = group.ask(0, request);
  CHECK_EQUAL(last.extensionMs, 0);
  CHECK_CONTAINS(last.text, "it has been compiling for 2.5 s");
}

TEST(eachThreadThatAwaitsAVerdictGetsTheExtension) {
  Group group(2);
  issue(group.answers[0], 3);
  issue(group.answers[1], 2);
  group.answers[1].relaxedMs = 60000;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back(
        [&] { CHECK_EQUAL(group.ranks[0]->await(questionOn(2), nullptr).extensionMs, 1000); });
  }
  for (auto& thread : threads) thread.join();
}

TEST(anOperationThatEndsWhileItsVerdictIsAwaitedIsNotSaidToHang) {
  Group group(2);
  for (auto& answer : group.answers) issue(answer, 3);
  const auto verdict = group.ranks[0]->await(questionOn(2), [] { return true; });
  CHECK(verdict.extensionMs > 0);
}

TEST(aRankThatHasJustCompiledHasTheRestOfATimeout) {
  Group group(2);
  issue(group.answers[0], 3);
  issue(group.answers[1], 2);
  group.answers[1].compiledMs = 400;
  CHECK_EQUAL(group.ask(0, questionOn(2)).extensionMs, 600);
  group.answers[1].compiledMs = 1400;
  CHECK_EQUAL(group.ask(0, questionOn(2)).extensionMs, 0);
}

TEST(aRankThatHasAskedForTimeGetsItWhateverTheLimit) {
  Group group(3);
  issue(group.answers[0], 3);
  group.answers[1].relaxedMs = 60000;
  issue(group.answers[2], 3);
  auto request = questionOn(3);
  request.compileLeftMs = -1;
  CHECK_EQUAL(group.ask(0, request).extensionMs, 1000);  // and again
  issue(group.answers[2], 2);                            // also missing, and without a reason
  CHECK_EQUAL(group.ask(0, request).extensionMs, 0);
}

TEST(aRankThatHasAskedForTimeAndJustComesDoesNotEndTheOperation) {
  auto request = questionOn(2);
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 2; ++rank) {
    answers[rank].rank = rank;
    issue(answers[rank], 3);
  }
  CHECK_EQUAL(judge(request, answers, {}).extensionMs, 0);
  answers[1].relaxedMs = 5000;
  CHECK_EQUAL(judge(request, answers, {}).extensionMs, 1000);
}

TEST(aRankThatHasDiedIsNotBlamedIfItMayHaveDoneItsPart) {
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 2; ++rank) {
    answers[rank].rank = rank;
    issue(answers[rank], rank == 0 ? 3 : 2);
  }
  const std::map<int, Silent> silent = {{2, {"its process is dead", true}}};
  const auto verdict = judge(questionOn(3), answers, silent);
  CHECK_EQUAL(ranksOf(verdict), "1 ");
  CHECK_CONTAINS(
      verdict.text, "rank 1 has not arrived at all_reduce #3 (8 x Float), issued 0 ms ago;");
  CHECK_CONTAINS(verdict.text, "; rank 2 did not answer\n");
  issue(answers[1], 3);
  CHECK_EQUAL(ranksOf(judge(questionOn(3), answers, silent)), "2 ");
}

// A question of `rank`, one of three, about an all-reduce that is the fourth collective.
DiagnosisRequest questionOnFourth(int rank) {
  auto request = questionOn(3, rank);
  request.op = "all_reduce #4 (1 x Float, SUM)";
  request.seq = 4;
  request.wait = waitIn(request.op, 4, ranksTo(3));
  return request;
}

// Answers to it: the ranks `behind` are in the third collective, and the others where it asks.
std::map<int, RankStatus> ranksInThirdAndFourth(
    const DiagnosisRequest& request, const std::set<int>& behind, const std::string& third,
    const std::string& signature) {
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 3; ++rank) {
    auto& answer = answers[rank];
    const bool isBehind = behind.contains(rank);
    answer.rank = rank;
    answer.currentSeq = isBehind ? 3 : 4;
    issue(answer, answer.currentSeq);
    answer.current = isBehind ? third : request.op;
    answer.signature = isBehind ? signature : request.signature;
    answer.waits = {waitIn(answer.current, answer.currentSeq, ranksTo(3))};
  }
  return answers;
}

TEST(ranksThatDisagreeBehindTheOneWhoAsksAreShown) {
  const auto request = questionOnFourth(2);
  auto answers = ranksInThirdAndFourth(
      request, {0, 1}, "broadcast #3 (1 x Float, root 0)", "broadcast Float root 0");
  CHECK_EQUAL(ranksOf(judge(request, answers, {})), "");  // both wait
  CHECK(judge(request, answers, {}).text.find("different operations") == std::string::npos);
  answers[1].signature = "broadcast Float root 1";
  CHECK_EQUAL(ranksOf(judge(request, answers, {})), "0 1 ");
  CHECK_CONTAINS(judge(request, answers, {}).text, "its ranks call different operations");
}

// A broadcast ends on its root, and so before the ranks that are in another operation of its
// number.
TEST(ranksDisagreeIfOneHasCompletedAnotherOperationOfTheNumberInWhichAnotherRankIs) {
  auto request = questionOnFourth(0);
  auto answers = ranksInThirdAndFourth(request, {1}, "barrier #3", "barrier");
  for (auto& [rank, answer] : answers) {
    answer.completed = {"broadcast #3 (5 x Float, root 0)", 3, "broadcast Float root 0"};
  }
  answers[1].completed = {"all_reduce #2 (1 x Float, SUM)", 2, request.signature};
  CHECK_EQUAL(ranksOf(judge(request, answers, {})), "0 1 2 ");
  const auto text = judge(request, answers, {}).text;
  CHECK_CONTAINS(text, "its ranks call different operations");
  CHECK_CONTAINS(text, "ranks 0, 2: completed broadcast #3 (5 x Float, root 0), issued all_reduce");
  CHECK_CONTAINS(text, "rank 1: issued barrier #3");
  request.seq = 3;
  request.op = "barrier #3";
  request.signature = "barrier";
  request.wait = answers[1].waits.front();
  request.rank = 1;
  CHECK_EQUAL(ranksOf(judge(request, answers, {})), "0 2 ");
  for (const int rank : {0, 2}) {
    answers[rank].completed.signature = "barrier";  // it has only ended earlier there
  }
  CHECK(judge(request, answers, {}).arrived);
}

TEST(howAnOperationIsDescribedChangesNoVerdict) {
  auto request = questionOn(2);
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 2; ++rank) {
    answers[rank].rank = rank;
    issue(answers[rank], 3);
    answers[rank].currentSeq = 3;
    answers[rank].signature = request.signature;
    answers[rank].current = rank == 0 ? "all_reduce #3 (8 x Float)" : "send #9 x broadcast";
  }
  CHECK_CONTAINS(judge(request, answers, {}).text, "all ranks have arrived");
}

TEST(aRankOneOperationBehindThatWaitsIsNotBlamedForTheOneItWaitsFor) {
  auto request = questionOn(4, 1);
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 3; ++rank) {
    answers[rank].rank = rank;
    issue(answers[rank], rank == 1 ? 3 : 2);
    answers[rank].waits = {
        rank == 1 ? request.wait : waitIn("gather #2 (4 x Float, root 2)", 2, ranksTo(4))};
  }
  const std::map<int, Silent> silent = {{3, {"its process is stopped", true}}};
  CHECK_EQUAL(ranksOf(judge(request, answers, silent)), "3 ");
  answers[3].rank = 3;
  issue(answers[3], 1);
  const auto late = judge(request, answers, {});
  CHECK_EQUAL(ranksOf(late), "3 ");
  CHECK_CONTAINS(late.text, "rank 3 has not arrived at all_reduce #3 (8 x Float), issued 0 ms ago");
}

TEST(aRankThatComputesIsNotSaidToWait) {
  // Rank 0 asks about an asynchronous operation. Rank 1 waits for rank 0 in another group.
  auto request = questionOn(2);
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 2; ++rank) {
    answers[rank].rank = rank;
    issue(answers[rank], rank == 0 ? 3 : 2);
    answers[rank].counts.push_back({kGroup + 1, static_cast<uint64_t>(rank), 0, {}});
  }
  auto barrier = waitIn("barrier #1 of group 'B'", 1, ranksTo(2));
  barrier.group = kGroup + 1;
  answers[1].waits = {barrier};
  const auto verdict = judge(request, answers, {});
  CHECK_EQUAL(ranksOf(verdict), "0 ");
  CHECK(verdict.text.find("deadlock") == std::string::npos);
  CHECK_CONTAINS(
      verdict.text, "rank 0 has not arrived at barrier #1 of group 'B', in which rank 1");
}

namespace {

// Rank 0's main thread waits in an all-reduce for rank 1, of which a thread waits for rank 0 in
// group `control`; `main`: the main thread does.
std::map<int, RankStatus> circleThrough(bool main) {
  constexpr uint64_t kMain = 7001, kHelper = 7002;
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 2; ++rank) {
    answers[rank].rank = rank;
    answers[rank].mainThread = kMain;
    issue(answers[rank], rank == 0 ? 3 : 2);
    answers[rank].counts.front().collectivesThread = kMain;
    answers[rank].counts.push_back({kGroup + 1, 0, 0, {}});
  }
  answers[0].current = "all_reduce #3 (8 x Float)";
  answers[0].stand = Stand::inCall;
  answers[0].waits = {waitIn(answers[0].current, 3, ranksTo(2))};
  answers[0].waits.front().thread = kMain;
  answers[0].waits.front().threadName = "MainThread";
  Wait recv;
  recv.text = "recv #1 from rank 0 of group 'control'";
  recv.group = kGroup + 1;
  recv.members = runsOf(ranksTo(2));
  recv.messages = {{AwaitedMessage::Kind::receive, 0, 1}};
  recv.thread = main ? kMain : kHelper;
  recv.threadName = main ? "MainThread" : "listener";
  answers[1].waits = {recv};
  answers[1].threads = "MainThread: train.py:7 in load\nlistener: train.py:3 in listen";
  return answers;
}

}  // namespace

TEST(aHelperThreadThatWaitsMakesNoDeadlockOfItsRanksLateness) {
  const auto verdict = judge(questionOn(2), circleThrough(/*main=*/false), {});
  CHECK_EQUAL(ranksOf(verdict), "1 ");
  CHECK_CONTAINS(verdict.text, ": rank 1 has not arrived at all_reduce #3");
  CHECK_CONTAINS(verdict.text, "\n      MainThread: train.py:7 in load");
  CHECK(verdict.text.find("\n  deadlock:") == std::string::npos);
  CHECK_CONTAINS(
      verdict.text,
      "\n  perhaps a deadlock, if a rank's thread waits for another one of its threads: rank 0 "
      "(MainThread) waits in all_reduce #3 (8 x Float) for rank 1 (listener), which waits in recv "
      "#1 from rank 0 of group 'control' for rank 0 (MainThread)");
  auto compiles = circleThrough(/*main=*/false);
  compiles[1].compilingMs = 100;  // a doubtful circle is no reason not to wait
  CHECK(judge(questionOn(2), compiles, {}).extensionMs > 0);
}

TEST(aCircleOfTheThreadsThatAreWaitedForIsADeadlock) {
  auto answers = circleThrough(/*main=*/true);
  CHECK_CONTAINS(judge(questionOn(2), answers, {}).text, "\n  deadlock: rank 0 waits in");
  // The thread that has issued the group's last collective is gone: any may issue the next one.
  answers = circleThrough(/*main=*/false);
  answers[1].counts.front().collectivesThread = kAnyThread;
  CHECK_CONTAINS(judge(questionOn(2), answers, {}).text, "\n  deadlock: rank 0 waits in");
}

TEST(aRankThatIsInNoOperationIsShownWhereItIsAndNotInWhatItHasIssued) {
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 3; ++rank) {
    answers[rank].rank = rank;
    issue(answers[rank], rank == 2 ? 2 : 3);
    answers[rank].current = "all_reduce #3 (8 x Float)";
    answers[rank].calledAt = "train.py:10 in step";
    answers[rank].threads = "MainThread: train.py:" + std::to_string(20 + rank) + " in load";
    answers[rank].waitedMs = 2000;
  }
  answers[0].stand = Stand::inCall;
  answers[0].waits = {waitIn("all_reduce #3 (8 x Float)", 3, ranksTo(3))};
  answers[2].current = "all_reduce #2 (8 x Float)";
  const auto text = judge(questionOn(3), answers, {}).text;
  CHECK_CONTAINS(
      text,
      "\n  rank 2: issued all_reduce #2 (8 x Float) 2 s ago, called at train.py:10 in step\n      "
      "MainThread: train.py:22 in load");
  CHECK_CONTAINS(
      text,
      "\n  rank 1: issued all_reduce #3 (8 x Float), called at train.py:10 in step\n      "
      "MainThread: train.py:21 in load");
  CHECK_CONTAINS(text, "\n  rank 0: in all_reduce #3 (8 x Float), called at train.py:10 in step");
  CHECK(text.find("train.py:20") == std::string::npos);  // the same line
  answers[0].stand = Stand::awaited;                     // in wait(), at another line
  CHECK_CONTAINS(judge(questionOn(3), answers, {}).text, "\n      MainThread: train.py:20 in load");
}

TEST(messagesInACircleAreADeadlock) {
  auto request = questionOn(3);
  request.signature.clear();
  request.seq = 0;
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 3; ++rank) {
    const int from = (rank + 1) % 3;
    answers[rank].rank = rank;
    issue(answers[rank], 1);
    Wait wait;
    wait.text = "recv #1 from rank " + std::to_string(from);
    wait.group = kGroup;
    wait.members = runsOf(ranksTo(3));
    wait.messages = {{AwaitedMessage::Kind::receive, from, 1}};
    answers[rank].waits = {wait};
  }
  request.wait = answers[0].waits.front();
  const auto verdict = judge(request, answers, {});
  CHECK_EQUAL(ranksOf(verdict), "");
  CHECK_CONTAINS(
      verdict.text,
      "\n  deadlock: rank 0 waits in recv #1 from rank 1 for rank 1, which waits in recv #1 from "
      "rank 2 for rank 2, which waits in recv #1 from rank 0 for rank 0");
  answers[1].counts.front().peers = {{0, 1, 0, 0}};  // rank 1 has sent: its message is under way
  CHECK(judge(request, answers, {}).text.find("deadlock") == std::string::npos);
}

TEST(groupsUsedInOppositeOrderAreNamedAsADeadlock) {
  DiagnosisRequest request;
  request.group = "A";
  request.size = 3;
  request.globalRanks = {4, 5, 6};
  request.op = "all_reduce #1 (1 x Float, SUM)";
  request.seq = 1;
  request.wait = waitIn(request.op, 1, request.globalRanks);
  std::map<int, RankStatus> answers;
  for (int rank = 0; rank < 3; ++rank) {
    answers[rank].rank = rank;
    issue(answers[rank], rank == 1 ? 0 : 1);
    answers[rank].current = rank == 1 ? "" : request.op;
    if (rank != 1) answers[rank].waits = {request.wait};
  }
  auto barrier = waitIn("barrier #1 of group 'B'", 1, {4, 5, 7});
  barrier.group = kGroup + 1;
  answers[1].waits = {barrier};
  answers[0].counts.push_back({kGroup + 1, 0, 0, {}});
  const auto text = judge(request, answers, {}).text;
  CHECK_CONTAINS(
      text,
      "\n  deadlock: rank 0 (global 4) waits in all_reduce #1 (1 x Float, SUM) for rank 1 (global "
      "5), which waits in barrier #1 of group 'B' for rank 0 (global 4); all ranks have to call "
      "the "
      "operations of several groups in one order");
  answers[0].counts.back().collectives = 1;  // it has come: another rank of B holds rank 1 up
  const auto other = judge(request, answers, {});
  CHECK(other.text.find("deadlock") == std::string::npos);
  CHECK_EQUAL(ranksOf(other), "");
  CHECK_CONTAINS(other.text, "; it waits in barrier #1 of group 'B'");
}

TEST(whatPeersSayCannotDriveATerminal) {
  DiagnosisRequest request;
  request.group = "\x1b[2J\u009bm\r";
  request.size = 2;
  request.seq = 1;
  const auto text = judge(request, {}, {{1, {"line\nline\t\u00e4"}}}).text;
  CHECK_CONTAINS(text, "group '\\x1b[2J\\x9bm\\x0d'");
  CHECK_CONTAINS(text, "line\nline\\x09\u00e4");
}

TEST(answersAndVerdictsSurviveTheBoard) {
  RankStatus answer;
  answer.rank = 7;
  answer.currentSeq = uint64_t{1} << 40;
  answer.current = "3:abc\n";
  answer.threads = std::string("a\0b", 3);
  answer.waits = {waitIn("elsewhere", 7, {2, 0})};
  answer.waits[0].messages = {{AwaitedMessage::Kind::signal, AwaitedMessage::kAnyRank, 3}};
  answer.waits[0].indirect = true;
  answer.counts = {{kGroup, 5, 1, {{2, 1, 0, 4}}}};
  const auto again = decodeStatus(encode(answer)).value();
  CHECK_EQUAL(again.rank, 7);
  CHECK_EQUAL(again.currentSeq, uint64_t{1} << 40);
  CHECK_EQUAL(again.current, answer.current);
  CHECK_EQUAL(again.threads, answer.threads);
  CHECK(encode(again) == encode(answer));
  CHECK_EQUAL(again.waits.at(0).messages.at(0).number, 3u);
  CHECK(again.waits.at(0).members == answer.waits[0].members);
  Verdict verdict;
  verdict.ranks = {3, 1};
  verdict.summary = "short";
  verdict.text = "text";
  const auto same = decodeVerdict(encode(verdict)).value();
  CHECK_EQUAL(ranksOf(same), "3 1 ");
  CHECK_EQUAL(same.summary, verdict.summary);
  for (const std::string damaged : {"", "5:ab", "x", "99999999999999999999:a", "-1:a"}) {
    CHECK(!decodeStatus(damaged));
    CHECK(!decodeVerdict(damaged));
  }
}

TEST(ranksUnderstandEachOtherInEveryLocale) {
  RankStatus answer;
  answer.rank = 1234;
  answer.currentSeq = 1234567;
  answer.counts = {{kGroup, 5000, 1, {{2000, 1, 0, 4}}}};
  answer.waits = {waitIn("elsewhere", 7, {2000, 0})};
  const auto text = encode(answer);
  for (const char separator : {' ', ',', '.'}) {
    const test::GroupedDigits locale(separator);
    CHECK(encode(answer) == text);
    const auto again = decodeStatus(text);
    CHECK(again && encode(*again) == text);
  }
}

TEST(compilingIsKnownFromTheFirstBeginToTheLastEnd) {
  Compiling::end();  // of a compilation that began before anybody listened
  CHECK(!Compiling::state(Clock::now()).since);
  Compiling::begin("DYNAMO");
  Compiling::begin("LAZY_BACKWARD");
  Compiling::end();
  CHECK(Compiling::state(Clock::now()).since);
  Compiling::end();
  const auto state = Compiling::state(Clock::now());
  CHECK(!state.since && state.ended);
  CHECK_EQUAL(Compiling::intervals().size(), 1u);
  CHECK(Compiling::intervals().front().end >= Compiling::intervals().front().begin);
}

namespace {

// The answers of many ranks to a question on all_reduce #2, of which the scene's part is late.
struct ManyRanks {
  enum class Scene { oneLate, halfLate, halvesWaitForEachOther, allButOneSilent, ring, pairs };

  ManyRanks(int size, Scene scene) {
    const auto members = ranksTo(size);
    request.size = size;
    request.globalRanks = members;
    request.op = "all_reduce #2 (8 x Float)";
    request.seq = 2;
    request.wait = waitIn(request.op, 2, members);
    for (int rank = 0; rank < size; ++rank) {
      RankStatus status;
      status.rank = rank;
      const auto wait = [&](const Wait& in) {
        status.waits = {in};
        status.current = in.text;
        status.stand = Stand::inCall;
        status.calledAt = "train.py:15 in main";
      };
      // Ranks compute at lines of their own.
      status.threads = "MainThread: train.py:" + std::to_string(100 + rank) + " in load";
      if (scene == Scene::allButOneSilent && rank > 0) {
        silent[rank] = {"did not answer (pid " + std::to_string(rank) + ")"};
        continue;
      }
      const bool late = scene == Scene::oneLate ? rank == size - 1 : rank >= size / 2;
      status.counts = {{kGroup, late ? 1u : 2u, 0, {}}, {kGroup + 1, late ? 2u : 1u, 0, {}}};
      if (scene == Scene::ring || scene == Scene::pairs) {
        const bool sends = scene == Scene::pairs && rank % 2 == 1;
        const int from = scene == Scene::ring ? (rank + 1) % size : rank ^ 1;
        Wait recv;
        recv.text = "recv #1 from rank " + std::to_string(from);
        recv.group = kGroup;
        recv.members = runsOf(members);
        recv.messages = {{AwaitedMessage::Kind::receive, from, 1}};
        status.counts = {{kGroup, rank == 0 ? 2u : 1u, 0, {}}};
        if (!sends) wait(recv);
      } else if (!late) {
        wait(request.wait);
      } else if (scene == Scene::halvesWaitForEachOther) {
        auto other = waitIn("all_reduce #2 of group 'other'", 2, members);
        other.group = kGroup + 1;
        wait(other);
      }
      answers[rank] = status;
    }
  }

  Verdict judge() const { return torchcomms_pg::judge(request, answers, silent); }

  DiagnosisRequest request;
  std::map<int, RankStatus> answers;
  std::map<int, Silent> silent;
};

constexpr ManyRanks::Scene kScenesOfMany[] = {
    ManyRanks::Scene::oneLate,
    ManyRanks::Scene::halfLate,
    ManyRanks::Scene::halvesWaitForEachOther,
    ManyRanks::Scene::allButOneSilent,
    ManyRanks::Scene::ring,
    ManyRanks::Scene::pairs};

}  // namespace

TEST(aVerdictHasAtMostFortyLinesWhateverTheNumberOfRanks) {
  for (const auto scene : kScenesOfMany) {
    for (const int size : {256, 2048}) {
      const ManyRanks ranks(size, scene);
      const auto verdict = ranks.judge();
      const auto lines = std::ranges::count(verdict.text, '\n') + 1;
      CHECK(lines <= 40);
      CHECK(verdict.text.size() < 8000);
      CHECK(verdict.summary.size() < 1000);
      CHECK(encode(verdict).size() < 16'000);
      for (const auto& [rank, answer] : ranks.answers) CHECK(encode(answer).size() < 1000);
    }
  }
  const auto half = ManyRanks(1024, ManyRanks::Scene::halfLate).judge();
  CHECK_CONTAINS(half.text, ": ranks 512-1023 have not arrived at all_reduce #2 (8 x Float)");
  CHECK_CONTAINS(half.text, "\n  rank 512: ");
  CHECK_CONTAINS(half.text, "\n      MainThread: train.py:612 in load\n");
  CHECK_CONTAINS(half.text, "\n  ranks 0-511: in all_reduce #2");
  CHECK_CONTAINS(half.text, " more ranks elsewhere, whose latest operations are in their dumps");
  CHECK_EQUAL(half.ranks.size(), 512u);
  CHECK_EQUAL(decodeVerdict(encode(half)).value().ranks.back(), 1023);
  const auto circle = ManyRanks(1024, ManyRanks::Scene::ring).judge();
  CHECK_CONTAINS(circle.text, "ranks 0-1023 wait for each other");
  CHECK_CONTAINS(circle.text, ", and so on, to rank 1023, which waits in recv #1 from rank 0");
}

// A limit for busy machines and sanitizers: a search that is quadratic in the waits took 5 s for
// 2,048 ranks, and would take 80 s for 8,192.
TEST(theBlameOfManyRanksIsFoundWithinTheRound) {
  for (const auto scene : kScenesOfMany) {
    const ManyRanks ranks(8192, scene);
    const auto begun = Clock::now();
    const auto verdict = ranks.judge();
    CHECK(Clock::now() - begun < milliseconds(3000));
    CHECK(!verdict.text.empty());
  }
}

TEST(oneRankPrintsAVerdictWholeAndTheOthersWhereToReadIt) {
  CHECK(awaitPrinted(std::chrono::seconds(20)));
  const int printed = memfd_create("stderr", 0);
  const int before = dup(STDERR_FILENO);
  dup2(printed, STDERR_FILENO);
  {
    Group group(4);
    for (auto& answer : group.answers) issue(answer, 3);
    issue(group.answers[1], 2);
    const auto verdict = group.ask(2, questionOn(4, 2));
    for (const auto& rank : group.ranks) {
      CHECK_EQUAL(rank->awaitOthers().value().text, verdict.text);  // in the error, whoever prints
    }
    const auto until = Clock::now() + milliseconds(20'000);
    const auto lines = [&] {
      CHECK(awaitPrinted(std::chrono::seconds(20)));
      std::string text(8192, '\0');
      text.resize(static_cast<size_t>(pread(printed, text.data(), text.size(), 0)));
      return text;
    };
    const auto count = [](const std::string& text, const std::string& part) {
      int found = 0;
      for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
      return found;
    };
    while (count(lines(), "verdict on group") < 4 && Clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    const auto text = lines();
    CHECK_EQUAL(count(text, ": rank 1 has not arrived at all_reduce #3"), 4);
    CHECK_EQUAL(count(text, " (rank 2 prints the rest)\n"), 3);
    CHECK_EQUAL(count(text, "\n  rank 1: "), 1);
  }
  dup2(before, STDERR_FILENO);
  close(before);
  close(printed);
}

TEST(aVerdictIsKnownThoughNobodyReadsStderr) {
  test::FullPipe unread;
  Group group(2);
  issue(group.answers[0], 3);
  issue(group.answers[1], 2);
  const auto begun = Clock::now();
  CHECK_EQUAL(ranksOf(group.ask(0, questionOn(2))), "1 ");
  CHECK(Clock::now() - begun < milliseconds(10'000));
  unread.readUntil("rank 1 has not arrived");
}

namespace {

// A board whose every answer takes a time by the test's clock.
class SlowBoard : public SharedBoard {
 public:
  SlowBoard(Clock::time_point& now, milliseconds takes, int& questions)
      : now_(now), takes_(takes), questions_(questions) {}
  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  std::optional<std::string> get(const std::string& key) override {
    now_ += takes_;
    ++questions_;
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  bool claim(const std::string&, const std::string&) override { return false; }
  int64_t add(const std::string&, int64_t) override { return 0; }

 private:
  Clock::time_point& now_;
  const milliseconds takes_;
  int& questions_;
  std::map<std::string, std::string> values_;
};

}  // namespace

TEST(questionsAboutSilentRanksAreBoundedInTimeForEachVerdict) {
  Clock::time_point now{};
  int questions = 0;
  RankWords words(
      std::make_unique<SlowBoard>(now, milliseconds(300), questions), [&] { return now; });
  words.write(0, "zero");
  words.write(5, "five");
  CHECK(words.of(0) == "zero");
  CHECK(words.of(0) == "zero");  // known: costs nothing
  CHECK_EQUAL(questions, 1);
  for (int rank = 1; rank < 4; ++rank) CHECK(words.of(rank) == "");
  CHECK_EQUAL(questions, 4);
  for (int rank = 4; rank < 300; ++rank) CHECK(!words.of(rank));  // the time is over
  CHECK(words.of(0) == "zero");
  CHECK_EQUAL(questions, 4);
  now += RankWords::kBetweenVerdicts + milliseconds(1);
  CHECK(words.of(5) == "five");  // of the next verdict
  CHECK(words.of(1) == "");      // a rank without a word is asked for again
  CHECK_EQUAL(questions, 6);
}
