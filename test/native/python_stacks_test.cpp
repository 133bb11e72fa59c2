// Words about a Python that does not answer.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "Check.hpp"
#include "diagnosis/hang/DiagnosisProtocol.hpp"
#include "diagnosis/rank/PythonStackDump.hpp"

using namespace test;
using std::chrono::milliseconds;
using torchcomms_pg::PythonStackDump;

namespace {

// A thread that asks Python, until the end of the process.
enum class Asks { looksAgainAndAgain, sleeps, hasTheGil };
std::atomic<Asks> asks;

PythonStackDump::Told ask(const PythonStackDump::Stacks&, const std::function<void()>& held) {
  if (asks == Asks::hasTheGil) held();
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  for (;;) {
    never.wait_for(lock, asks == Asks::sleeps ? milliseconds(100'000) : milliseconds(5));
  }
}

std::string toldBy(Asks how) {
  asks = how;
  const auto dump = std::make_unique<PythonStackDump>(PythonStackDump::Stacks{});
  while (!dump->ready()) std::this_thread::sleep_for(milliseconds(5));
  return dump->tell().threads;
}

}  // namespace

TEST(theGilIsSaidToBeHeldBeforeAnyStackIsReadAndStacksAreReadOnceForAllWhoAsk) {
  static std::atomic<int> readings{0};
  static std::atomic<bool> read{false};
  PythonStackDump::setSource({ask, [] {
                                ++readings;
                                while (!read) std::this_thread::sleep_for(milliseconds(5));
                                return std::string("a.py:3 in f");
                              }});
  const std::string held =
      "a thread holds the GIL and does not give it back, most likely in native code";
  CHECK_EQUAL(toldBy(Asks::looksAgainAndAgain), held);  // while the stacks are being read
  CHECK_EQUAL(toldBy(Asks::looksAgainAndAgain), held);
  read = true;
  while (PythonStackDump::seenWithoutGil().empty()) std::this_thread::sleep_for(milliseconds(5));
  CHECK_EQUAL(toldBy(Asks::looksAgainAndAgain), held + "; Python's stacks:\na.py:3 in f");
  CHECK_EQUAL(readings.load(), 1);
  toldBy(Asks::hasTheGil);  // what was read is over
  CHECK_EQUAL(toldBy(Asks::looksAgainAndAgain), held);
}

TEST(stacksThatAreReadWhileTheGilChangesHandsAreNotTold) {
  static std::atomic<bool> read{false};
  PythonStackDump::setSource({ask, [] {
                                while (!read) std::this_thread::sleep_for(milliseconds(5));
                                return std::string("a.py:3 in f");
                              }});
  toldBy(Asks::looksAgainAndAgain);
  toldBy(Asks::hasTheGil);
  read = true;
  while (torchcomms_pg::races::passed(torchcomms_pg::races::Race::gilChangedHands) == 0) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  CHECK_EQUAL(PythonStackDump::seenWithoutGil(), "");
}

TEST(aThreadThatGetsNoCpuDoesNotProveThatTheGilIsHeld) {
  PythonStackDump::setSource({ask, [] { return std::string(); }});
  const auto told = toldBy(Asks::sleeps);
#ifdef EMULATED  // whose own locks put a thread to sleep while it starts
  CHECK_CONTAINS(told, "a thread holds the GIL");
#else
  CHECK_EQUAL(told, "a thread holds the GIL, or this process gets too little CPU time to ask");
#endif
}

namespace {

using Values = std::map<std::string, std::string>;

class Board : public torchcomms_pg::SharedBoard {
 public:
  explicit Board(Values& values) : values_(values) {}
  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  std::optional<std::string> get(const std::string& key) override {
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  bool claim(const std::string& key, const std::string& value) override {
    return values_.emplace(key, value).first->second == value;
  }
  int64_t add(const std::string& key, int64_t value) override {
    const auto sum = std::atoll(values_[key].c_str()) + value;
    values_[key] = std::to_string(sum);
    return sum;
  }

 private:
  Values& values_;
};

}  // namespace

TEST(aRankWhosePythonDoesNotAnswerIsHeardLongBeforeItWouldCountAsSilent) {
  using torchcomms_pg::DiagnosisProtocol;
  PythonStackDump::setSource({ask, [] { return std::string(); }});
  asks = Asks::sleeps;
  Values values = {{"0/leader", "1"}};  // another rank has asked
  DiagnosisProtocol::Options options;
  options.rank = 0;
  options.ranks = {0, 1};
  DiagnosisProtocol protocol(std::make_unique<Board>(values), options);
  const auto begun = DiagnosisProtocol::Clock::now();
  const auto answer = [&](bool preliminary) {
    for (;;) {
      DiagnosisProtocol::Wanted wanted;
      if (protocol.wantsStatus()) wanted.status.emplace();
      protocol.step(std::move(wanted), DiagnosisProtocol::Clock::now());
      const auto status = torchcomms_pg::decodeStatus(values["0/answer/0"]);
      if (status && status->preliminary == preliminary) return *status;
      std::this_thread::sleep_for(milliseconds(5));
    }
  };
  CHECK_CONTAINS(answer(/*preliminary=*/true).threads, "a thread holds the GIL");
  CHECK(DiagnosisProtocol::Clock::now() - begun < milliseconds(1500));  // of 2.5 s
  CHECK_CONTAINS(answer(/*preliminary=*/false).threads, "a thread holds the GIL");
  CHECK_EQUAL(values["0/answers"], "2");
}

TEST(whoHasTheGilIsSlowAndDoesNotWaitForIt) {
  PythonStackDump::setSource({ask, [] { return std::string(); }});
  CHECK_EQUAL(toldBy(Asks::hasTheGil), "Python has not told its stacks in time");
}
