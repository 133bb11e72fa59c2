#include "diagnosis/status/Hosts.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <set>
#include <thread>
#include <utility>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "diagnosis/status/Folder.hpp"
#include "diagnosis/status/LocalProcesses.hpp"
#include "diagnosis/status/StatusServer.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg::status {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// kStoreLook: interval at which the answering process of a host looks into the store. kTurn:
// interval at which each process checks whether it is the answering one.
constexpr milliseconds kStoreLook{250};
constexpr milliseconds kTurn{1000};

// Limit of the wait for this host's processes. They wait for Python for a shorter time
// (StatusServer.cpp).
constexpr milliseconds kGather{500};

// Limit of the wait for the previous question's thread, which ends sooner unless the store hangs.
constexpr milliseconds kLeaving{100};

// Interval at which the asking host polls for answers, and its increase for each other host: one
// process serves the store for all hosts.
constexpr milliseconds kPoll{10};
constexpr std::chrono::microseconds kPollOfHost{200};

// A host whose latest answer is to a question more than kMisses ago has probably ended, such as a
// container of an elastic job. Only kGrace is spent on waiting for such a host.
constexpr int64_t kMisses{3};
constexpr milliseconds kGrace{2 * kStoreLook};

// Keys in the store. A host's answer replaces its previous one, so that the store does not grow.
constexpr const char* kAsked = "torchcomms_pg/status/asked";
constexpr const char* kHosts = "torchcomms_pg/status/hosts";
std::string keyOfHost(int64_t number) {
  return "torchcomms_pg/status/host/" + std::to_string(number);
}
std::string keyOfAnswer(const std::string& place) {
  return "torchcomms_pg/status/answer/" + place;
}

// This process's locks on the folder's file of turns, one byte for each store. The locks end with
// the process, and a forked child has none. One descriptor serves all stores, since closing any
// descriptor of the file releases all locks.
class Turns {
 public:
  // Takes the turn if it is free. Returns whether this process answers for its host: it has the
  // turn, or the process with the turn is stopped.
  bool have(const Folder& folder, const std::string& store) {
    LockGuard lock(mutex_);
    if (file_ < 0) {
      file_ =
          open((folder.path() + "/turns").c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    }
    auto wanted = lockOf(store, F_WRLCK);
    if (file_ < 0 || fcntl(file_, F_SETLK, &wanted) == 0) {
      return true;  // without a file every process answers
    }
    if (fcntl(file_, F_GETLK, &wanted) != 0 || wanted.l_type == F_UNLCK) {
      return true;
    }
    const char state = host::processState(static_cast<uint32_t>(wanted.l_pid));
    return state == 'T' || state == 't';
  }

  void leave(const std::string& store) {
    LockGuard lock(mutex_);
    const auto wanted = lockOf(store, F_UNLCK);
    fcntl(file_, F_SETLK, &wanted);
  }

 private:
  static struct flock lockOf(const std::string& store, short type) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(host::hashBytes(store.data(), store.size()) >> 2);
    lock.l_len = 1;
    return lock;
  }

  Mutex mutex_;
  int file_ GUARDED_BY(mutex_) = -1;
};
Turns& turns() {
  static PerProcess<Turns> ofProcess;
  return ofProcess.get();
}

std::vector<std::string> registered(SharedBoard& board) {
  std::vector<std::string> places;
  for (int64_t number = 1, count = board.add(kHosts, 0); number <= count; ++number) {
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
  State(std::string name, MakeBoard make) : store(std::move(name)), makeBoard(std::move(make)) {}

  const std::string store;
  const MakeBoard makeBoard;
  const uint32_t pid = host::processId();
  Mutex mutex;
  std::condition_variable wake;
  bool stop GUARDED_BY(mutex) = false;

  // State of the latest question to the other hosts.
  bool asking GUARDED_BY(mutex) = false;  // a question's thread runs
  // Number of the open question; take() increments it to close the question.
  uint64_t asked GUARDED_BY(mutex) = 0;
  bool done GUARDED_BY(mutex) = false;  // no more answers will arrive
  Told told GUARDED_BY(mutex);

  // Answers the questions of other hosts until `stop`. Raises the store's errors.
  void listen() {
    // Another process of the host answers from the end of this function on, however it ends.
    struct Leaving {
      const std::string& store;
      ~Leaving() { turns().leave(store); }
    } leaving{store};
    const Folder folder(StatusServer::folder());
    std::unique_ptr<SharedBoard> board;  // set since this process first had the turn
    int64_t heard = 0;
    Clock::time_point looked{};
    bool answers = false;
    UniqueLock lock(mutex);
    while (!stop) {
      lock.unlock();
      if (const auto now = Clock::now(); now - looked >= kTurn) {
        looked = now;
        answers = turns().have(folder, store);
      }
      if (answers) {
        if (!board) {
          board = makeBoard();
          enter(*board);
          // Answers the latest question, too: the process with the previous turn may have ended
          // before it answered.
          heard = std::max<int64_t>(board->add(kAsked, 0) - 1, 0);
        }
        if (const auto count = board->add(kAsked, 0); count > heard) {
          heard = count;
          const auto answer = std::to_string(count) + " " + encode(gather(folder, kGather));
          board->set(keyOfAnswer(ownPlace()), answer);
        }
      }
      lock.lock();
      wake.wait_for(lock, answers ? kStoreLook : kTurn, [&]() REQUIRES(mutex) { return stop; });
    }
  }

  static void enter(SharedBoard& board) {
    const auto place = ownPlace();
    const auto places = registered(board);
    if (std::ranges::find(places, place) == places.end()) {
      board.set(keyOfHost(board.add(kHosts, 1)), place);
    }
  }

  // Asks the other hosts, and publishes their answers until all hosts that are likely to answer
  // have answered, `until` has passed, or the question is closed.
  void collect(uint64_t question, Clock::time_point until) {
    const auto board = makeBoard();
    const auto number = board->add(kAsked, 1);
    auto places = registered(*board);
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
      return now < until &&
             (places.size() > quiet.size() || (!places.empty() && now - begun < kGrace));
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
    {
      LockGuard lock(mutex);
      if (question != asked) {
        return;
      }
      told = found;
      done = all;
    }
    wake.notify_all();
  }
};

Hosts::Hosts(std::string store, MakeBoard makeBoard)
    : state_(std::make_shared<State>(std::move(store), std::move(makeBoard))) {
  startDetached("tcpg_hosts", "its status for other hosts", [state = state_] {
    try {
      state->listen();
    } catch (const std::exception&) {
      // The store ended with the process that serves it, or no descriptor is free. Other hosts
      // report that this host does not answer.
    }
  });
}

Hosts::~Hosts() {
  if (state_->pid != host::processId()) {
    return;  // a forked child; a thread of the parent may have held the lock
  }
  {
    LockGuard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
}

const std::string& Hosts::store() const {
  return state_->store;
}

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
    Told wrong;
    try {
      self->collect(question, until);
    } catch (const std::exception& error) {
      const std::string what = error.what();
      wrong.unreached.push_back(
          {"other hosts", "the job's store is gone (" + what.substr(0, what.find('\n')) + ")"});
    }
    if (!wrong.unreached.empty()) {
      self->publish(question, wrong, true);
    }
    {
      LockGuard lock(self->mutex);
      self->asking = false;
    }
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
