#include "diagnosis/status/Hosts.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <set>
#include <utility>

#include "base/Mutex.hpp"
#include "base/Thread.hpp"
#include "diagnosis/status/LocalProcesses.hpp"

namespace torchcomms_pg::status {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Limit of the wait for the previous question's thread, which ends sooner unless the store hangs.
constexpr milliseconds kLeaving{100};

// Interval at which the asking host polls for answers, and its increase for each other host: one
// process serves the store for all hosts.
constexpr milliseconds kPoll{10};
constexpr std::chrono::microseconds kPollOfHost{200};

// A host whose latest answer is to a question more than kMisses ago has probably ended, such as a
// container of an elastic job. Only kGraceLooks intervals of the hosts' looks are spent on waiting
// for such a host.
constexpr int64_t kMisses{3};
constexpr int kGraceLooks = 2;

// Returns the places of the hosts that look into the store.
std::vector<std::string> registered(SharedBoard& board, int64_t lookers) {
  std::vector<std::string> places;
  for (int64_t number = 1; number <= lookers; ++number) {
    const auto place = board.get(keyOfHost(number));
    if (place && std::ranges::find(places, *place) == places.end()) {
      places.push_back(*place);
    }
  }
  return places;
}

// Returns the number of the question to which the answer belongs, and the rest of the answer.
std::pair<int64_t, std::string> split(const std::string& answer) {
  const auto blank = std::min(answer.find(' '), answer.size());
  return {std::atoll(answer.c_str()), answer.substr(std::min(blank + 1, answer.size()))};
}

}  // namespace

struct Hosts::State {
  explicit State(std::shared_ptr<SharedBoard> given) : board(std::move(given)) {}

  const std::shared_ptr<SharedBoard> board;
  Mutex mutex;
  std::condition_variable wake;

  // State of the latest question to the other hosts.
  bool asking GUARDED_BY(mutex) = false;  // a question's thread runs
  // Number of the open question; take() increments it to close the question.
  uint64_t asked GUARDED_BY(mutex) = 0;
  bool done GUARDED_BY(mutex) = false;  // no more answers will arrive
  Told told GUARDED_BY(mutex);

  // Asks the other hosts, and publishes their answers until all hosts that are likely to answer
  // have answered, `until` has passed, or the question is closed.
  void collect(uint64_t question, Clock::time_point until) {
    const auto count = NewsCount::add(*board, NewsCount::kQuestion);
    const auto number = count.questions;
    auto places = registered(*board, count.lookers);
    std::erase(places, ownPlace());
    Told found;
    for (const auto& place : places) {
      found.unreached.push_back({place, "has not answered in time"});
    }
    publish(question, found, places.empty());
    const auto begun = Clock::now();
    std::set<std::string> quiet;  // hosts that have not answered the latest questions either
    const auto due = [&] {
      const auto now = Clock::now();
      return now < until && (places.size() > quiet.size() ||
                             (!places.empty() && now - begun < kGraceLooks * count.interval()));
    };
    while (due() && staysOpen(question, kPoll + places.size() * kPollOfHost)) {
      for (const auto& place : std::vector(places)) {
        const auto text = board->get(keyOfAnswer(place));
        const auto [to, body] = split(text.value_or(""));
        if (to < number) {
          if (number - to > kMisses) {
            quiet.insert(place);
          }
          continue;
        }
        quiet.erase(place);
        std::erase(places, place);
        const auto entry = std::ranges::find(found.unreached, place, &UnreachedHost::host);
        if (auto host = decodeHost(body)) {
          found.unreached.erase(entry);
          found.hosts.push_back(std::move(*host));
        } else {
          entry->why = "has another version of torchcomms_pg";
        }
        publish(question, found, places.empty());
      }
    }
    if (!places.empty() && places.size() == quiet.size()) {
      for (auto& host : found.unreached) {
        if (quiet.contains(host.host)) {
          host.why += ", nor the questions before; it may have ended";
        }
      }
      publish(question, found, true);
    }
  }

  // Waits for `time`. Returns false at once if another question is asked, or this one is over.
  bool staysOpen(uint64_t question, std::chrono::microseconds time) {
    UniqueLock lock(mutex);
    return !wake.wait_for(lock, time, [&]() REQUIRES(mutex) { return question != asked; });
  }

  void publish(uint64_t question, const Told& found, bool all) {
    LockGuard lock(mutex);
    if (question == asked) {
      told = found;
      done = all;
      wake.notify_all();
    }
  }
};

Hosts::Hosts(const std::string& store, std::shared_ptr<SharedBoard> board)
    : news_(store, board), state_(std::make_shared<State>(std::move(board))) {}

void Hosts::ask(Clock::time_point until) {
  auto& state = *state_;
  UniqueLock lock(state.mutex);
  state.wake.wait_for(lock, kLeaving, [&]() REQUIRES(state.mutex) { return !state.asking; });
  const auto question = ++state.asked;
  state.told = Told();
  state.told.unreached.push_back({"other hosts", "the job's store has not answered"});
  state.done = false;
  if (state.asking) {
    return;  // a hanging store blocks one thread, not one for each question
  }
  startDetached("tcpg_hosts", "asking other hosts", [self = state_, question, until] {
    attempt([&] {
      try {
        self->collect(question, until);
      } catch (const std::exception& error) {
        const std::string what = error.what();
        Told wrong;
        wrong.unreached.push_back(
            {"other hosts", "the job's store is gone (" + what.substr(0, what.find('\n')) + ")"});
        self->publish(question, wrong, true);
      }
    });
    LockGuard lock(self->mutex);
    self->asking = false;
    self->wake.notify_all();
  });
  state.asking = true;
}

Hosts::Told Hosts::take(
    Clock::time_point until, const std::function<bool(const HostStatus&)>& enough) {
  UniqueLock lock(state_->mutex);
  size_t seen = 0;
  state_->wake.wait_until(lock, until, [&]() REQUIRES(state_->mutex) {
    bool over = state_->done;
    for (; seen < state_->told.hosts.size(); ++seen) {
      over = enough(state_->told.hosts[seen]) || over;
    }
    return over;
  });
  ++state_->asked;  // closes the question, so that its thread ends
  state_->wake.notify_all();
  return state_->told;
}

}  // namespace torchcomms_pg::status
