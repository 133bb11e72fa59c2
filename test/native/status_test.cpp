// The status of jobs: what processes tell, put together, and how they are asked.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "Check.hpp"
#include "Jobs.hpp"
#include "diagnosis/lateness/Lateness.hpp"
#include "diagnosis/status/Gateway.hpp"
#include "diagnosis/status/Hosts.hpp"
#include "diagnosis/status/LocalProcesses.hpp"
#include "diagnosis/status/News.hpp"
#include "diagnosis/status/Roll.hpp"
#include "diagnosis/status/StatusServer.hpp"
#include "judge/JobReport.hpp"

using namespace torchcomms_pg;
using namespace torchcomms_pg::status;
using std::chrono::milliseconds;

namespace {

std::string makeFolder() {
  char path[] = "/tmp/status_test_XXXXXX";
  CHECK(mkdtemp(path) != nullptr);
  return path;
}

// Makes a process that serves the status of a rank until it is killed.
pid_t serve(const std::string& folder, int rank) {
  int ready[2];
  CHECK(pipe(ready) == 0);
  const pid_t child = fork();
  if (child == 0) {
    StatusServer::setFolder(folder);
    const auto server = StatusServer::of(
        {[rank] {
           Description description;
           description.status = rankOf(rank, 3, 4, false);
           description.status.pid = static_cast<uint32_t>(getpid());
           description.setLines = [](ProcessStatus&, const std::vector<std::string>&) {};
           return description;
         },
         [](const OfJob&) { return std::string("{}"); }, [](uint64_t) {}});
    CHECK(server != nullptr);
    server->add({kId, rank});
    CHECK(write(ready[1], "r", 1) == 1);
    for (;;) pause();
  }
  char byte = 0;
  CHECK(read(ready[0], &byte, 1) == 1);
  close(ready[0]);
  close(ready[1]);
  return child;
}

}  // namespace

TEST(theRankThatAThousandOthersWaitForIsNamed) {
  constexpr int kRanks = 1024;
  std::vector<ProcessStatus> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes.push_back(rankOf(rank, kRanks, rank == 77 ? 3 : 4, rank != 77));
  }
  const auto begun = std::clock();
  const auto hosts = hostsOf(processes);
  const auto decoded = std::clock();
  const auto text = report({hosts, {}, question()});
  const auto ms = [](std::clock_t ticks) {
    return static_cast<int>(ticks * 1000 / CLOCKS_PER_SEC);
  };
  std::printf(
      "1024 ranks: %d ms of CPU for their texts, %d ms to report\n", ms(decoded - begun),
      ms(std::clock() - decoded));
  CHECK_CONTAINS(text, "\"waits_for\":[77],\"behind\":[77]");
  CHECK_CONTAINS(text, "rank 77 has not arrived at all_reduce #4 (8 x Float), issued 20 s ago");
  CHECK_CONTAINS(text, "\"healthy\":false");
}

TEST(howLateEachRankIsIsShownAsOneOfThemHasJudged) {
  std::vector<ProcessStatus> processes{rankOf(0, 2, 4, false), rankOf(1, 2, 4, false)};
  for (auto& process : processes) {
    process.ranks.front().groups.front().ranks = {5, 9};
  }
  CHECK_CONTAINS(report({hostsOf(processes), {}, question()}), "\"lateness\":null");
  auto& judged = processes[1].ranks.front().groups.front().lateness;
  judged = {{{-0.08, 0}, {0.0801, 0.65}}, 84, 10.5, 1};
  const auto told = report({hostsOf(processes), {}, question()});
  CHECK_CONTAINS(
      told,
      "\"lateness\":{\"late\":9,\"collectives\":84,\"took_s\":10.5,\"ranks\":["
      "{\"rank\":5,\"later_s\":-0.08,\"share\":0},"
      "{\"rank\":9,\"later_s\":0.0801,\"share\":0.65}]}");
  judged.late = std::nullopt;
  CHECK_CONTAINS(report({hostsOf(processes), {}, question()}), "\"lateness\":{\"late\":null,");
  // Of another number of ranks: not the group's.
  judged.ranks.pop_back();
  CHECK_CONTAINS(report({hostsOf(processes), {}, question()}), "\"lateness\":null");
}

TEST(thePartOfAGroupOnADeviceIsToldOfOnceARankHasUsedIt) {
  std::vector<ProcessStatus> processes{rankOf(0, 2, 4, false), rankOf(1, 2, 4, false)};
  for (auto& process : processes) {
    auto& groups = process.ranks.front().groups;
    auto part = groups.front();
    part.id = kId + 1;
    part.queues = true;
    part.collectives = 0;
    part.lastCompleted = {};
    groups.push_back(std::move(part));
  }
  const auto partId = "{\"id\":\"" + std::to_string(kId + 1) + "\"";
  CHECK(report({hostsOf(processes), {}, question()}).find(partId) == std::string::npos);
  processes[1].ranks.front().groups.back().lastCompleted.text = "all_reduce #1 (8 x Float)";
  const auto told = report({hostsOf(processes), {}, question()});
  CHECK(told.find(partId) != told.rfind(partId));  // among the groups, and those of the ranks
}

TEST(anOperationThatIsYoungerThanTheQuestionAccusesNobody) {
  const std::vector<ProcessStatus> processes{rankOf(0, 2, 4, true), rankOf(1, 2, 3, false)};
  auto asked = question();
  asked.lateMs = 0;
  asked.tookMs = 20'001;
  CHECK_CONTAINS(report({hostsOf(processes), {}, asked}), "\"healthy\":true");
  asked.tookMs = 20'000;
  CHECK_CONTAINS(report({hostsOf(processes), {}, asked}), "\"behind\":[1]");
}

TEST(ofHostsThatHaveNotAnsweredNobodyIsAccused) {
  std::vector<ProcessStatus> processes;
  for (int rank = 0; rank < 8; ++rank) {
    processes.push_back(rankOf(rank, 16, 4, true));
  }
  const auto text =
      report({hostsOf(processes), {{"host1", "has not answered in time"}}, question()});
  CHECK_CONTAINS(text, "{\"host\":\"host1\",\"why\":\"has not answered in time\"}");
  CHECK_CONTAINS(text, "did not answer, so that nobody knows whether they have arrived");
  CHECK_CONTAINS(text, "\"state\":\"unknown\"");
}

TEST(hostsAreWaitedForUntilAllRanksOfTheJobHaveAnswered) {
  std::vector<ProcessStatus> processes;
  for (int rank = 0; rank < 24; ++rank) {
    processes.push_back(rankOf(rank, 16, 4, false));
  }
  // The third host has another job, but for a rank that shares a group with one of the second.
  for (int rank = 16; rank < 24; ++rank) {
    processes[rank] = rankOf(rank - 16, 8, 4, false);
    processes[rank].host = "host2";
    processes[rank].ranks.front().groups.front().id = kId + 1;
  }
  auto hosts = hostsOf(processes);
  Roll alone(question());
  alone.add(hosts[0]);
  CHECK(!alone.complete());
  alone.add(hosts[2]);
  CHECK(!alone.complete());
  alone.add(hosts[1]);
  CHECK(alone.complete());
  hosts[1].processes.front().ranks.push_back(hosts[2].processes.front().ranks.front());
  Roll shared(question());
  shared.add(hosts[0]);
  shared.add(hosts[1]);
  CHECK(!shared.complete());
  shared.add(hosts[2]);
  CHECK(shared.complete());
  // One that is known to be stopped has told all it can.
  hosts[1].silent.push_back({1, "", "stopped", {{kId, 15}}});
  hosts[1].processes.pop_back();
  hosts[1].processes.front().ranks.pop_back();
  Roll stopped(question());
  stopped.add(hosts[0]);
  stopped.add(hosts[1]);
  CHECK(stopped.complete());
}

TEST(processesOfAnotherJobAreLeftOut) {
  std::vector<ProcessStatus> processes{rankOf(0, 2, 4, false), rankOf(1, 2, 4, false)};
  processes.push_back(rankOf(5, 8, 9, true));
  processes.back().ranks.front().groups.front().id = kId + 1;
  const auto text = report({hostsOf(processes), {}, question()});
  CHECK_CONTAINS(text, "\"healthy\":true");
  CHECK(text.find("1005") == std::string::npos);
}

TEST(theStatusIsTheSameWhereTheAnswersHaveTravelled) {
  std::vector<ProcessStatus> processes{rankOf(0, 4, 4, true), rankOf(1, 4, 3, false)};
  processes[0].ranks.front().groups.front().lateness = {
      {{-0.0812345, 0}, {0.0801, 0.65}, {0, 0}, {1e-7, 0}}, 84, 10.5, 1};
  processes[0].threads = "MainThread: a \"line\" \\ of\ntwo";
  processes[1].pythonSilentMs = 210;
  processes[1].otherWaits = {{"new_group", {0, 1, 2}, true, 30'000, "train.py:7", 0, -1}};
  JobAnswers answers{hostsOf(processes), {{"host1/boot", "has not answered in time"}}, question()};
  answers.hosts.front().silent.push_back({1002, "is stopped", "stopped", {{kId, 2}}});
  const auto text = encode(answers);
  const auto travelled = decodeAnswers(text);
  CHECK(travelled.has_value());
  const auto json = report(*travelled);
  CHECK_EQUAL(json, report(answers));
  CHECK_CONTAINS(json, "\"verdict\":\"verdict on group");
  CHECK_CONTAINS(json, "\"operation\":\"new_group\"");
  CHECK(!decodeAnswers(text.substr(0, text.size() - 1)).has_value());
  CHECK(!decodeAnswers(text + "1 ").has_value());
}

TEST(damagedAnswersAreRefused) {
  const auto text = encode(rankOf(0, 4, 4, true));
  CHECK(decodeProcess(text).has_value());
  CHECK(!decodeProcess(text.substr(0, text.size() / 2)).has_value());
  CHECK(!decodeProcess(text + "1 ").has_value());
  CHECK(!decodeProcess("").has_value());
  auto strange = rankOf(0, 4, 4, true);
  strange.ranks.front().groups.front().rank = 4;  // of 4
  CHECK(!decodeProcess(encode(strange)).has_value());
}

TEST(ranksTravelWhateverTheirOrder) {
  for (const auto& ranks : std::vector<std::vector<int64_t>>{
           {0}, {3, 1}, {0, 8, 16, 24}, {5, 4, 3, 9, 9, 1, 2}, {7, 7, 7}}) {
    auto process = rankOf(0, 1, 4, false);
    process.ranks.front().groups.front().ranks = ranks;
    const auto decoded = decodeProcess(encode(process));
    CHECK(decoded.has_value());
    CHECK(decoded->ranks.front().groups.front().ranks == ranks);
  }
}

TEST(processesAreAskedAndThoseThatAreStoppedOrDeadAreKnown) {
  const auto folder = makeFolder();
  const pid_t there = serve(folder, 0);
  const pid_t stopped = serve(folder, 1);
  const pid_t dead = serve(folder, 2);
  CHECK(kill(stopped, SIGSTOP) == 0);
  CHECK(waitpid(stopped, nullptr, WUNTRACED) == stopped);
  CHECK(kill(dead, SIGKILL) == 0);
  CHECK(waitpid(dead, nullptr, 0) == dead);
  const Folder opened(folder);
  const auto host = gather(opened, milliseconds(20'000));
  CHECK_EQUAL(host.processes.size(), size_t{1});
  CHECK_EQUAL(host.processes.front().pid, static_cast<uint32_t>(there));
  CHECK_EQUAL(host.silent.size(), size_t{2});
  for (const auto& silent : host.silent) {
    const bool isDead = silent.pid == static_cast<uint32_t>(dead);
    CHECK_EQUAL(silent.state, std::string(isDead ? "dead" : "stopped"));
    CHECK(silent.memberships == (std::vector<Membership>{{kId, isDead ? 2 : 1}}));
  }
  opened.sweep();  // the dead one's group lives
  CHECK_EQUAL(opened.entries().size(), size_t{3});
  for (const pid_t process : {there, stopped}) {
    CHECK(kill(process, SIGKILL) == 0);
    CHECK(waitpid(process, nullptr, 0) == process);
  }
  opened.sweep();
  CHECK(opened.entries().empty());
  std::filesystem::remove_all(folder);
}

TEST(aFolderOfAnyDepthIsGoodForASocket) {
  const auto base = makeFolder();
  const auto folder = base + "/" + std::string(200, 'x');
  const pid_t process = serve(folder, 0);
  CHECK_EQUAL(gather(Folder(folder), milliseconds(20'000)).processes.size(), size_t{1});
  CHECK(kill(process, SIGKILL) == 0);
  CHECK(waitpid(process, nullptr, 0) == process);
  std::filesystem::remove_all(base);
}

namespace {

// A store in memory for several hosts, which counts its requests. Thread-safe.
class CountingBoard : public SharedBoard {
 public:
  void set(const std::string& key, const std::string& value) override {
    const auto with = this->with();
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    const auto with = this->with();
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  bool claim(const std::string& key, const std::string& value) override {
    const auto with = this->with();
    return values_.emplace(key, value).second;
  }
  int64_t add(const std::string& key, int64_t value) override {
    const auto with = this->with();
    auto& text = values_[key];
    const auto sum = (text.empty() ? 0 : std::stoll(text)) + value;
    text = std::to_string(sum);
    return sum;
  }
  int64_t requests() const { return requests_; }
  // Has all calls from now on raise.
  void end() { ended_ = true; }

 private:
  std::unique_lock<std::mutex> with() {
    ++requests_;
    if (ended_) throw std::logic_error("the store is gone");
    return std::unique_lock(mutex_);
  }

  std::atomic<int64_t> requests_{0};
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

std::shared_ptr<HangDiagnosis> diagnosisOn(int rank) {
  HangDiagnosis::Options options;
  options.rank = rank;
  options.ranks = {0, 1};
  return HangDiagnosis::openWithoutThread(std::make_unique<CountingBoard>(), std::move(options));
}

// Returns whether the diagnosis is notified within 20 s. If so, has it look.
bool hears(HangDiagnosis& diagnosis) {
  for (int i = 0; i < 4000; ++i) {
    if (diagnosis.due(HangDiagnosis::Clock::now())) {
      diagnosis.step(HangDiagnosis::Clock::now());
      return true;
    }
    usleep(5000);
  }
  return false;
}

}  // namespace

TEST(hostsThatHaveEndedHoldUpOnlyTheFirstQuestions) {
  const auto folder = makeFolder();
  StatusServer::setFolder(folder);
  constexpr int kEnded = 20;
  const auto board = std::make_shared<CountingBoard>();
  for (int host = 1; host <= kEnded; ++host) {
    NewsCount::add(*board, NewsCount::kLooker);
    board->set(keyOfHost(host), "container" + std::to_string(host));
  }
  Hosts hosts("store", board);
  const auto ask = [&] {
    const auto begun = std::chrono::steady_clock::now();
    const auto until = begun + std::chrono::seconds(20);
    hosts.ask(until);
    const auto told = hosts.take(until, [](const HostStatus&) { return false; });
    CHECK_EQUAL(told.unreached.size(), size_t{kEnded});
    return std::make_pair(std::chrono::steady_clock::now() - begun, told.unreached.front().why);
  };
  // The store has had three questions that none of these hosts has answered.
  NewsCount::add(*board, 3 * NewsCount::kQuestion);
  const auto [took, why] = ask();
  CHECK(took < std::chrono::seconds(10));
  CHECK(why.find("has not answered in time, nor the questions before") == 0);
  // A host that answers again is waited for, and told.
  const auto number = NewsCount::add(*board, 0).questions + 1;
  board->set(keyOfAnswer("container1"), std::to_string(number) + " " + encode(HostStatus()));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  hosts.ask(until);
  const auto told = hosts.take(until, [](const HostStatus&) { return false; });
  CHECK_EQUAL(told.hosts.size(), size_t{1});
  CHECK_EQUAL(told.unreached.size(), size_t{kEnded - 1});
  std::filesystem::remove_all(folder);
}

TEST(aRingReachesTheDiagnosesOfItsGroupOnAllHostsAndNoOther) {
  StatusServer::setFolder("");  // each News is a host of its own
  const auto store = std::make_shared<CountingBoard>();
  News here("store", store);
  News there("store", store);
  const auto own = diagnosisOn(0);
  const auto other = diagnosisOn(1);
  const auto another = diagnosisOn(1);
  here.listen(1, own);
  there.listen(1, other);
  there.listen(2, another);
  // Ranks may have rung before this.
  CHECK(hears(*own) && hears(*other) && hears(*another));
  // A ring is counted before its group is written. A host that looks between the two notifies all
  // groups, which cannot be so each time.
  bool onlyItsGroup = false;
  for (int rings = 0; rings < 20 && !onlyItsGroup; ++rings) {
    here.ring(1);
    CHECK(hears(*own));
    CHECK(hears(*other));
    onlyItsGroup = !another->due(HangDiagnosis::Clock::now());
    CHECK(onlyItsGroup || hears(*another));
  }
  CHECK(onlyItsGroup);
  News::ring(*store, 2);
  CHECK(hears(*another));
}

TEST(aGroupIsNotifiedWhenTheStoreIsGoneOrManyRing) {
  StatusServer::setFolder("");
  const auto store = std::make_shared<CountingBoard>();
  News news("store", store);
  const auto diagnosis = diagnosisOn(0);
  news.listen(1, diagnosis);
  CHECK(hears(*diagnosis));
  NewsCount::add(*store, 100 * NewsCount::kRing);  // whose groups nobody reads
  const auto before = store->requests();
  CHECK(hears(*diagnosis));
  CHECK(store->requests() - before < 100);
  store->end();
  CHECK(hears(*diagnosis));
}

TEST(aRingWhoseRankDiedBeforeItWroteTheGroupIsForAllGroups) {
  StatusServer::setFolder("");
  const auto store = std::make_shared<CountingBoard>();
  News news("store", store);
  const auto diagnosis = diagnosisOn(0);
  const auto another = diagnosisOn(0);
  news.listen(1, diagnosis);
  news.listen(2, another);
  CHECK(hears(*diagnosis) && hears(*another));
  NewsCount::add(*store, NewsCount::kRing);
  CHECK(hears(*diagnosis) && hears(*another));
}

TEST(aStoreGetsAtMost500RequestsASecondOf4096RanksOn512HostsWhileNothingIsWrong) {
  constexpr int kHosts = 512;
  constexpr int kRanks = 4096;
  const auto aSecond = [](double requests, milliseconds interval) {
    return 1000 * requests / static_cast<double>(interval.count());
  };
  const auto looks = aSecond(kHosts, NewsCount{.lookers = kHosts}.interval());
  for (const int groups : {1, 4, 50}) {
    const auto publications = 2.0 * kRanks * groups;  // each is written once, and read once
    CHECK(looks + aSecond(publications, publicationInterval(kRanks, groups)) <= 500);
  }
  // Up to 64 hosts and 64 ranks wait no longer than one.
  CHECK(NewsCount{.lookers = 64}.interval() == NewsCount{.lookers = 1}.interval());
  CHECK(publicationInterval(64, 2) == publicationInterval(2, 1));
}

TEST(aStoreGetsNoMoreRequestsOf512HostsThanOf64) {
  StatusServer::setFolder("");
  const auto store = std::make_shared<CountingBoard>();
  std::vector<std::unique_ptr<News>> hosts;
  for (int host = 0; host < 512; ++host) {
    hosts.push_back(std::make_unique<News>("store", store));
  }
  for (int i = 0; i < 4000 && NewsCount::add(*store, 0).lookers < 512; ++i) {
    usleep(5000);
  }
  sleep(2);  // the longest interval, after which each knows how many they are
  const auto begun = std::chrono::steady_clock::now();
  const auto before = store->requests();
  sleep(4);
  const auto took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun);
  const auto requests = static_cast<double>(store->requests() - before);
  // Two intervals may begin within the time, and one of them just before its end.
  CHECK(requests <= 512 * (1 + took.count() / 2));
  CHECK(requests > 0);
  CHECK(hosts.front()->slack() == milliseconds(1000));
}

#ifndef EMULATED  // QEMU refuses a clone that shares memory and is neither a thread nor a fork
TEST(aProgramThatIsRunApartIsNoChildAndHasNoFileOfThisProcess) {
  const auto folder = makeFolder();
  const auto file = folder + "/told";
  const int own = fcntl(STDERR_FILENO, F_DUPFD, 500);  // open in a program that inherits files
  CHECK(own >= 500);
  runApart(
      {"/bin/sh", "-c", "(echo $WORD; echo /proc/$$/fd/*) > $0.new && mv $0.new $0", file},
      {"WORD=from-the-environment"});
  CHECK(waitpid(-1, nullptr, __WALL | WNOHANG) == -1 && errno == ECHILD);
  std::string text;
  for (int i = 0; i < 2000 && text.empty(); ++i) {
    usleep(5000);
    std::ifstream in(file);
    text.assign(std::istreambuf_iterator<char>(in), {});
  }
  CHECK_CONTAINS(text, "from-the-environment\n");
  CHECK_CONTAINS(text, "/fd/2");
  CHECK(text.find("/fd/" + std::to_string(own)) == std::string::npos);
  close(own);
  std::filesystem::remove_all(folder);
}

TEST(aProgramThatCannotBeRunApartIsAnErrorThatSaysWhy) {
  try {
    runApart({"/no/such/program"}, {});
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK_EQUAL(
        std::string(error.what()),
        std::string("cannot run /no/such/program: No such file or directory"));
  }
}
#endif

TEST(theReportNamesTheMembersOfAGroupThatHaveNotAnsweredAndWhatTheOthersHaveIssued) {
  std::vector<ProcessStatus> processes{rankOf(0, 4, 4, false)};
  auto& left = processes.emplace_back(rankOf(1, 4, 4, false));
  left.ranks.front().groups.front().id = kId + 1;
  processes.front().ranks.front().groups.push_back(left.ranks.front().groups.front());
  processes.front().ranks.front().groups.back().rank = 0;
  auto hosts = hostsOf(processes);
  hosts.front().silent.push_back({1002, "its process is dead (pid 1002)", "dead", {{kId, 2}}});
  const auto text = report({hosts, {{"host1", "has not answered in time"}}, question()});
  CHECK_CONTAINS(
      text,
      "\"missing\":[{\"rank\":1,\"state\":\"elsewhere\",\"host\":\"host0\",\"pid\":1001,\"text\":");
  CHECK_CONTAINS(
      text,
      "{\"rank\":2,\"state\":\"dead\",\"host\":\"host0\",\"pid\":1002,"
      "\"text\":\"its process is dead (pid 1002)\"},{\"rank\":3,\"state\":\"unknown\",\"text\":");
  CHECK_CONTAINS(text, "\"issued\":{\"Broadcast\":0,\"Reduce\":0,");
  CHECK_CONTAINS(text, "\"AllReduce\":4,");
  CHECK_CONTAINS(text, "\"torchcomms_pg\":\"1.2.3\"");
}
