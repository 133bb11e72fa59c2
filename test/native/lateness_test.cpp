// Judgements on who is late, of ranks that a generator makes up: seeds, no clock.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numbers>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "Check.hpp"
#include "diagnosis/lateness/Arrivals.hpp"
#include "diagnosis/lateness/AwaitedEnd.hpp"
#include "diagnosis/lateness/Lateness.hpp"

using namespace torchcomms_pg;
using Clock = ArrivalLog::Clock;

namespace {

// How a job's ranks work. Times in seconds.
struct Work {
  int ranks = 2;
  int collectives = 1;      // of the group of all, in a step
  double step = 0.1;        // time of a rank's own work in a step
  bool bursts = false;      // all the work comes before the first collective of a step
  bool async = false;       // the collectives of a step are waited for at its end
  bool pairs = false;       // each two ranks meet in a group of their own before each step
  double noise = 0.05;      // deviation of the logarithm of each piece of work
  double stalls = 0.01;     // probability of one of 100 to 500 ms in a piece of work
  std::vector<int> late{};  // ranks that are `factor` times as slow
  double factor = 1.3;
  double lateInPairs = 1;   // factor of rank 0's work before it comes to the other of its pair
  uint64_t checkpoint = 0;  // rank 0 takes two seconds longer in every such step; 0: none
  double firstSteps = 1;    // factor of the work of rank 0 in the first three steps
  uint64_t stallAt = 0;     // step at which rank 1 stops for a minute
};

class Simulation {
 public:
  Simulation(const Work& job, uint64_t seed)
      : job_(job), random_(seed), logs_(job.ranks), pairLogs_(job.ranks), ranks_(job.ranks) {}

  void step() {
    ++steps_;
    if (job_.pairs) {
      for (int rank = 0; rank < job_.ranks; ++rank) {
        work(rank, job_.step / 2 * (rank == 0 ? job_.lateInPairs : 1));
      }
      for (int first = 0; first + 1 < job_.ranks; first += 2) {
        meet(pairLogs_, first, first + 2, steps_, /*waits=*/true);
      }
    }
    for (int number = 0; number < job_.collectives; ++number) {
      for (int rank = 0; rank < job_.ranks; ++rank) {
        const double all = number == 0 ? job_.step : 0;
        work(rank, job_.bursts ? all : job_.step / job_.collectives);
        if (number == 0) {
          disturb(rank);
        }
      }
      const bool waits = !job_.async || number == job_.collectives - 1;
      meet(logs_, 0, job_.ranks, ++seq_, waits);
    }
  }

  Lateness judge() const { return judged(logs_, 0, job_.ranks); }
  Lateness judgePair(int first) const { return judged(pairLogs_, first, first + 2); }

 private:
  struct Rank {
    double now = 0;
    double waited = 0;
  };

  static Clock::duration duration(double seconds) {
    return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
  }

  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  double normal() {
    return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(2 * std::numbers::pi * uniform());
  }

  void work(int rank, double seconds) {
    const bool late = std::ranges::find(job_.late, rank) != job_.late.end();
    seconds *= std::exp(job_.noise * normal()) * (late ? job_.factor : 1);
    if (uniform() < job_.stalls) {
      seconds += 0.1 + 0.4 * uniform();
    }
    ranks_[rank].now += seconds;
  }

  void disturb(int rank) {
    if (rank == 0 && job_.checkpoint > 0 && steps_ % job_.checkpoint == 0) {
      ranks_[rank].now += 2;
    }
    if (rank == 0 && steps_ <= 3) {
      ranks_[rank].now += job_.step * (job_.firstSteps - 1);
    }
    if (rank == 1 && steps_ == job_.stallAt) {
      ranks_[rank].now += 60;
    }
  }

  void meet(std::vector<ArrivalLog>& logs, int from, int to, uint64_t seq, bool waits) {
    double last = 0;
    for (int rank = from; rank < to; ++rank) {
      auto& [now, waited] = ranks_[rank];
      logs[rank].note(seq, Clock::time_point(duration(now)), duration(waited), 1);
      last = std::max(last, now);
    }
    for (int rank = from; waits && rank < to; ++rank) {
      auto& [now, waited] = ranks_[rank];
      const double end = last + 0.001 + 0.0002 * uniform();
      logs[rank].addWait(duration(end - now));
      waited += end - now;
      now = end;
    }
  }

  static Lateness judged(const std::vector<ArrivalLog>& logs, int from, int to) {
    std::vector<Arrivals> all;
    for (int rank = from; rank < to; ++rank) {
      all.push_back(logs[rank].get());
    }
    return judgeLateness(all);
  }

  const Work job_;
  std::mt19937_64 random_;
  std::vector<ArrivalLog> logs_;
  std::vector<ArrivalLog> pairLogs_;
  std::vector<Rank> ranks_;
  uint64_t steps_ = 0;
  uint64_t seq_ = 0;
};

std::string named(const Lateness& lateness) {
  return lateness.late ? std::to_string(*lateness.late) : "nobody";
}

// Runs jobs, and checks after each step that only the rank of `job.late` is ever named, if that is
// one. Returns in how many it was named within the steps.
int run(const char* what, const Work& job, int runs, int steps) {
  int found = 0;
  for (int seed = 0; seed < runs; ++seed) {
    Simulation simulation(job, static_cast<uint64_t>(seed) + 1);
    bool known = false;
    for (int step = 1; step <= steps; ++step) {
      simulation.step();
      if (step < 16 || (steps > 20 && step % 4 != 0)) {
        continue;  // nothing is known yet; or takes long
      }
      const auto who = named(simulation.judge());
      const bool right = job.late.size() == 1 && who == std::to_string(job.late.front());
      known = known || right;
      if (!right && who != "nobody") {
        std::fprintf(
            stderr, "%s, %d ranks, %d collectives a step, seed %d, step %d\n", what, job.ranks,
            job.collectives, seed + 1, step);
        CHECK_EQUAL(who, std::string("nobody"));
      }
    }
    found += known ? 1 : 0;
  }
  return found;
}

// Returns a tenth of the runs where they are slow: a few show as much of what is looked for there.
int fewer(int runs) {
  return test::kSlow ? std::max(1, runs / 10) : runs;
}

// Makes jobs of each form. `stalls`: number of stalls in a step, of the whole job.
std::vector<Work> jobs(std::vector<int> sizes, double noise, double stalls) {
  std::vector<Work> all;
  for (const int ranks : sizes) {
    for (const int collectives : {1, 5, 16}) {
      for (const int form : {0, 1, 2}) {
        if (collectives == 1 && form > 0) {
          continue;  // the same
        }
        Work job;
        job.ranks = ranks;
        job.collectives = collectives;
        job.bursts = form == 1;
        job.async = form == 2;
        job.noise = noise;
        job.stalls = stalls / ranks / collectives;
        all.push_back(job);
      }
    }
  }
  return all;
}

}  // namespace

TEST_WITHIN(aLateRankIsNamedWithin20Steps, 120) {
  int all = 0;
  int found = 0;
  for (auto job : jobs({2, 3, 8, 64}, /*noise=*/0.05, /*stalls=*/0.01)) {
    job.late = {job.ranks / 2};
    const int runs = fewer(job.ranks == 64 ? 10 : 60);
    all += runs;
    found += run("one is late", job, runs, 20);
  }
  CHECK(found >= all * 99 / 100);
}

TEST_WITHIN(ranksThatTakeEquallyLongAreNeverCalledLate, 120) {
  for (const double noise : {0.1, 0.5}) {
    for (const auto& job : jobs({2, 3, 8}, noise, /*stalls=*/0.2)) {
      run("equal", job, fewer(60), 80);
    }
    for (const auto& job : jobs({64}, noise, /*stalls=*/0.2)) {
      run("equal", job, fewer(4), 40);
    }
  }
}

TEST_WITHIN(twoLateRanksCheckpointsAStallAndASlowStartNameNobody, 120) {
  for (const auto& job : jobs({3, 8}, /*noise=*/0.05, /*stalls=*/0.01)) {
    auto two = job;
    two.late = {0, 2};
    run("two are late", two, fewer(10), 120);
    auto checkpoints = job;
    checkpoints.checkpoint = 100;
    run("checkpoints", checkpoints, fewer(10), 220);
    auto stall = job;
    stall.stallAt = 40;
    run("a stall", stall, fewer(10), 80);
    auto start = job;
    start.firstSteps = 100;
    run("a slow start", start, fewer(10), 80);
  }
}

TEST(aRankThatIsLateBecauseItWaitsInAnotherGroupIsNotNamed) {
  for (const bool async : {false, true}) {
    Work job;
    job.ranks = 4;
    job.pairs = true;
    job.async = async;
    job.collectives = 3;
    job.stalls = 0;
    job.lateInPairs = 2;
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      Simulation simulation(job, seed);
      for (int step = 1; step <= 40; ++step) {
        simulation.step();
        for (const auto& lateness : {simulation.judge(), simulation.judgePair(0)}) {
          CHECK(!lateness.late || *lateness.late == 0);
        }
        CHECK(!simulation.judgePair(2).late);
      }
      CHECK_EQUAL(named(simulation.judgePair(0)), std::string("0"));
    }
  }
}

TEST(aRankThatDoesMoreWhileTheOthersWaitForSomebodyElseIsNotNamed) {
  // Rank 0 waits elsewhere for as long as rank 1 works: both come at the same time.
  std::vector<ArrivalLog> logs(2);
  for (int step = 1; step <= 40; ++step) {
    const Clock::time_point now{std::chrono::milliseconds(100 * step)};
    for (int rank = 0; rank < 2; ++rank) {
      const std::chrono::milliseconds elsewhere(rank == 0 ? 50 * step : 0);
      logs[rank].note(step, now, elsewhere + std::chrono::milliseconds(step), 1);
      logs[rank].addWait(std::chrono::milliseconds(1));
    }
  }
  const auto lateness = judgeLateness({logs[0].get(), logs[1].get()});
  CHECK_EQUAL(lateness.ranks.size(), size_t{2});
  CHECK(lateness.ranks[1].later > 0.045);
  CHECK_EQUAL(lateness.ranks[1].share, 0.0);
  CHECK(!lateness.late);
}

TEST(onlyWhoIsLaterThanEachOtherSteadilyAndByMuchIsNamed) {
  // `own(rank, step)`: milliseconds of work before a collective, for which all wait.
  const auto judged = [](const auto& own) {
    std::vector<ArrivalLog> logs(3);
    std::vector<int64_t> waited(3, 0);
    int64_t start = 0;
    for (int step = 1; step <= 34; ++step) {
      const int64_t end = start + std::max({own(0, step), own(1, step), own(2, step)}) + 1;
      for (int rank = 0; rank < 3; ++rank) {
        const std::chrono::milliseconds at(start + own(rank, step));
        const std::chrono::milliseconds wait(std::chrono::milliseconds(end) - at);
        logs[rank].note(step, Clock::time_point(at), std::chrono::milliseconds(waited[rank]), 1);
        logs[rank].addWait(wait);
        waited[rank] += wait.count();
      }
      start = end;
    }
    return judgeLateness({logs[0].get(), logs[1].get(), logs[2].get()});
  };
  // Without rank 0 the others would wait for rank 1, nearly as long.
  const auto two = judged([](int rank, int) { return int64_t{rank == 0 ? 130 : 136 - 12 * rank}; });
  CHECK_EQUAL(named(two), std::string("nobody"));
  CHECK(two.ranks[0].later > 0.01 && two.ranks[0].share > 0 && two.ranks[0].share < kLateShare);
  const auto one = judged([](int rank, int) { return int64_t{rank == 0 ? 130 : 100}; });
  CHECK_EQUAL(named(one), std::string("0"));
  // Sooner in six of 32.
  const auto sometimes = judged(
      [](int rank, int step) { return int64_t{rank == 0 ? (step % 5 == 0 ? 60 : 130) : 100}; });
  CHECK(sometimes.ranks[0].share > kLateShare);
  CHECK_EQUAL(named(sometimes), std::string("nobody"));
  // By 5 ms or by 100: too little is known of how late it is.
  const auto changing = judged(
      [](int rank, int step) { return int64_t{rank == 0 ? (step % 2 == 0 ? 105 : 200) : 100}; });
  CHECK(changing.ranks[0].share > kLateShare);
  CHECK_EQUAL(named(changing), std::string("nobody"));
}

TEST(whatIsSaidOfALateRankIsHowLateItIs) {
  Work job;
  job.ranks = 4;
  job.noise = 0;
  job.stalls = 0;
  job.late = {2};
  Simulation simulation(job, 1);
  for (int step = 0; step < 40; ++step) {
    simulation.step();
  }
  const auto lateness = simulation.judge();
  CHECK_EQUAL(named(lateness), std::string("2"));
  CHECK(std::abs(lateness.ranks[2].later - 0.03) < 0.001);
  CHECK(std::abs(lateness.ranks[2].share - 0.03 / 0.131) < 0.01);
  CHECK(std::abs(lateness.ranks[1].later) < 0.001);
  CHECK_EQUAL(lateness.ranks[1].share, 0.0);
  CHECK_EQUAL(lateness.collectives, uint64_t{38});  // the last wait is not known
  CHECK(std::abs(lateness.seconds - 38 * 0.131) < 0.02);
}

TEST(manyCollectivesInAShortTimeAreKeptByPlacesThatRanksHaveInCommon) {
  std::vector<ArrivalLog> logs(2);
  for (uint64_t seq = 1; seq <= 100'000; ++seq) {
    for (int rank = 0; rank < 2; ++rank) {
      // One begins a second earlier, so that its log is thinned out before the other's.
      logs[rank].note(seq, Clock::time_point(std::chrono::milliseconds(seq + 1000 * rank)), {}, 1);
    }
  }
  const auto first = logs[0].get();
  CHECK(first.seqs.size() <= ArrivalLog::kMost);
  CHECK(first.at.back() >= 15'000'000);
  const auto second = logs[1].get();
  CHECK(std::ranges::includes(first.seqs, second.seqs));
  // Slow ones are all kept again.
  for (uint64_t seq = 100'001; seq <= 100'100; ++seq) {
    logs[0].note(seq, Clock::time_point(std::chrono::seconds(seq)), {}, 1);
  }
  const auto later = logs[0].get();
  CHECK_EQUAL(later.seqs.back(), uint64_t{100'100});
  CHECK_EQUAL(later.seqs[later.seqs.size() - 50], uint64_t{100'051});
}

TEST(damagedListsAndWaitsOfOtherThreadsAreNotJudged) {
  std::vector<Arrivals> ranks(2);
  ArrivalLog log;
  for (int step = 1; step <= 40; ++step) {
    log.note(step, Clock::time_point(std::chrono::milliseconds(100 * step)), {}, step % 2);
    log.addWait(std::chrono::milliseconds(1));
  }
  CHECK(judgeLateness({log.get(), log.get()}).ranks.empty());
  ranks[0] = log.get();
  ranks[1] = ranks[0];
  ranks[1].waited.pop_back();
  CHECK(judgeLateness(ranks).ranks.empty());
  CHECK(judgeLateness({}).ranks.empty());
  CHECK(judgeLateness({Arrivals{}, Arrivals{}}).ranks.empty());
}

TEST(theEndOfAnEarlierOperationIsNotThatOfTheOneThatIsAwaited) {
  const auto soon = [] { return Clock::now() - std::chrono::milliseconds(1); };
  auto& awaited = AwaitedEnd::ofThread();
  const auto begun = Clock::now();
  const auto earlier = awaited.await(soon());
  CHECK(awaited.get() == Clock::time_point{});
  const auto later = awaited.await(soon() + std::chrono::microseconds(1));
  earlier(0);
  CHECK(awaited.get() == Clock::time_point{});
  later(0);
  CHECK(awaited.get() >= begun);
  CHECK(awaited.get() <= Clock::now());
}

TEST(anEndThatIsToldOnceItsThreadHasEndedIsNobodys) {
  AwaitedEnd* of = nullptr;
  std::optional<AwaitedEnd::Callback> late;
  std::thread([&] {
    of = &AwaitedEnd::ofThread();
    CHECK(of != nullptr);
    late = of->await(Clock::now());
  }).join();
  std::thread([&] {
    auto& awaited = AwaitedEnd::ofThread();
    CHECK(&awaited == of);  // threads that come and go make no more of them
    std::thread([&] { CHECK(&AwaitedEnd::ofThread() != of); }).join();
    const auto own = awaited.await(Clock::now());
    (*late)(0);
    CHECK(awaited.get() == Clock::time_point{});
    own(0);
    CHECK(awaited.get() > Clock::time_point{});
  }).join();
}
