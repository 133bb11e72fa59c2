#include "diagnosis/status/News.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "diagnosis/status/Folder.hpp"
#include "diagnosis/status/LocalProcesses.hpp"
#include "diagnosis/status/Protocol.hpp"
#include "diagnosis/status/StatusServer.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg::status {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Interval at which each process checks whether it is its turn to look.
constexpr milliseconds kBetweenTurns{1000};

// Limit of the wait for this host's processes. They wait for Python for a shorter time
// (StatusServer.cpp).
constexpr milliseconds kGather{500};

// Limit of the rings between two looks of which the groups are read. Beyond it, all groups are
// notified: when many ranks connect with each other, each pair rings.
constexpr int64_t kMany = 16;

// Delay of a ring for which a round of a diagnosis has time anyway.
constexpr milliseconds kUsualDelay{1000};

// Keys in the store. A host's answer replaces its previous one, so that the store does not grow.
constexpr const char* kCount = "torchcomms_pg/news";
std::string keyOfPlace(const std::string& place) {
  return "torchcomms_pg/news/place/" + place;
}
std::string keyOfRing(int64_t number) {
  return "torchcomms_pg/news/ring/" + std::to_string(number);
}

// This process's locks on the folder's file of turns, one byte for each store. The locks end with
// the process, and a forked child has none. One descriptor serves all stores, since closing any
// descriptor of the file releases all locks. It is closed when the last store is left.
class Turns {
 public:
  // Takes the turn if it is free. Returns whether this process answers for its host: it has the
  // turn, or the process with the turn is stopped.
  bool have(const Folder& folder, const std::string& store) {
    LockGuard lock(mutex_);
    stores_.insert(store);
    if (!file_) {
      constexpr int kFlags = O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC;
      file_ = FileDescriptor(open((folder.path() + "/turns").c_str(), kFlags, 0600));
    }
    auto wanted = lockOf(store, F_WRLCK);
    if (!file_ || fcntl(file_.get(), F_SETLK, &wanted) == 0) {
      return true;  // without a file every process answers
    }
    if (fcntl(file_.get(), F_GETLK, &wanted) != 0 || wanted.l_type == F_UNLCK) {
      return true;
    }
    return host::processStopped(static_cast<uint32_t>(wanted.l_pid));
  }

  void leave(const std::string& store) {
    LockGuard lock(mutex_);
    const auto wanted = lockOf(store, F_UNLCK);
    fcntl(file_.get(), F_SETLK, &wanted);
    stores_.erase(store);
    if (stores_.empty()) {
      file_ = FileDescriptor();
    }
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
  std::set<std::string> stores_ GUARDED_BY(mutex_);  // which this process looks into
  FileDescriptor file_ GUARDED_BY(mutex_);
};
PerProcess<Turns> turns;

// Has the other processes of the folder look into the store. Waits for none of them: a stopped
// process looks when it goes on. Raises std::runtime_error if no descriptor is free.
void passOn(const Folder& folder, uint64_t store) {
  const auto question = aboutNews(store);
  const auto own = Folder::own().name();
  for (const auto& entry : folder.entries()) {
    const auto socket = entry.name() == own ? FileDescriptor() : folder.connect(entry);
    if (socket) {
      send(socket.get(), question.data(), question.size(), MSG_NOSIGNAL);
    }
  }
}

}  // namespace

NewsCount NewsCount::add(SharedBoard& board, int64_t what) {
  const auto sum = board.add(kCount, what);
  return {sum % kRing, sum % kLooker / kRing, sum / kLooker};
}

std::string keyOfHost(int64_t number) {
  return "torchcomms_pg/news/host/" + std::to_string(number);
}
std::string keyOfAnswer(const std::string& place) {
  return "torchcomms_pg/news/answer/" + place;
}

struct News::State {
  State(const std::string& store, std::shared_ptr<SharedBoard> given)
      : name(store), number(host::hashBytes(store.data(), store.size())), board(std::move(given)) {}

  using Listeners = std::vector<std::weak_ptr<HangDiagnosis>>;

  const std::string name;  // of the store
  const uint64_t number;
  const std::shared_ptr<SharedBoard> board;
  const uint32_t pid = host::processId();
  std::atomic<int64_t> slackMs{0};

  Mutex mutex;
  std::condition_variable wake;
  bool stop GUARDED_BY(mutex) = false;
  bool told GUARDED_BY(mutex) = false;            // this process is to look at once
  std::vector<uint64_t> rings GUARDED_BY(mutex);  // groups to ring for
  // By group.
  std::multimap<std::string, std::weak_ptr<HangDiagnosis>> listeners GUARDED_BY(mutex);
  Listeners newcomers GUARDED_BY(mutex);  // to notify once

  // State of the thread. The counts are of news that this process has handled.
  std::optional<Folder> folder;  // empty without a status server
  // The folder for which this process has had its turn, "" without one.
  std::optional<std::string> entered;
  int64_t passed = 0;    // rings, for the host's other processes
  int64_t heard = 0;     // rings, for this process
  int64_t answered = 0;  // questions

  // Looks until `stop`. Raises the store's errors.
  void run() {
    // Another process of the host looks from the end of this function on, however it ends.
    struct Leaving {
      const std::string& name;
      ~Leaving() { turns.get().leave(name); }
    } leaving{name};
    heard = NewsCount::add(*board, 0).rings;
    Clock::time_point checked{};
    bool looks = false;
    UniqueLock lock(mutex);
    while (!stop) {
      const auto due = std::exchange(rings, {});
      const auto first = std::exchange(newcomers, {});
      const bool now = std::exchange(told, false) || !due.empty();
      lock.unlock();
      for (const auto group : due) {
        News::ring(*board, group);
      }
      notify(first);  // a ring that comes later is heard, as it is not counted in `heard`
      if (const auto time = Clock::now(); time - checked >= kBetweenTurns) {
        checked = time;
        looks = isLooker();
      }
      const auto interval = looks || now ? look(looks && folder) : kBetweenTurns;
      lock.lock();
      wake.wait_for(lock, looks ? interval : kBetweenTurns, [&]() REQUIRES(mutex) {
        return stop || told || !rings.empty() || !newcomers.empty();
      });
    }
  }

  // Returns whether this process looks unasked.
  bool isLooker() {
    const auto path = StatusServer::runs() ? StatusServer::folder() : "";
    if (path.empty()) {
      folder.reset();
    } else if (!folder || folder->path() != path) {
      folder.reset();
      tried([&] { folder.emplace(path); });
    }
    const bool looks = !folder || turns.get().have(*folder, name);
    if (looks && entered != path) {
      enter();
      entered = path;
    }
    return looks;
  }

  // Adds this host, or this process alone, to those that look.
  void enter() {
    const auto place = ownPlace();
    auto count = NewsCount::add(*board, 0);
    if (!folder || !board->get(keyOfPlace(place))) {
      count = NewsCount::add(*board, NewsCount::kLooker);
      if (folder) {
        board->set(keyOfHost(count.lookers), place);
        board->set(keyOfPlace(place), std::to_string(count.lookers));
      }
    }
    // Answers the latest question, too: the process with the previous turn may have ended before it
    // answered.
    answered = std::max<int64_t>(count.questions - 1, 0);
  }

  // Returns the time until the next look. `forHost`: looks for all of the host.
  milliseconds look(bool forHost) {
    const auto count = NewsCount::add(*board, 0);
    slackMs = std::max(count.interval() - kUsualDelay, milliseconds(0)).count();
    if (forHost && count.rings > passed && tried([&] { passOn(*folder, number); })) {
      passed = count.rings;
    }
    hear(count.rings);
    std::string answer;
    if (forHost && count.questions > answered &&
        tried([&] { answer = encode(gather(*folder, kGather)); })) {
      answered = count.questions;
      board->set(keyOfAnswer(ownPlace()), std::to_string(count.questions) + " " + answer);
    }
    return count.interval();
  }

  // Calls `body`, which uses the folder. Returns false if that has failed, for example since no
  // descriptor is free: the next look tries again.
  static bool tried(const auto& body) {
    try {
      body();
      return true;
    } catch (const std::runtime_error&) {
      return false;
    }
  }

  void hear(int64_t rung) {
    if (rung - heard > kMany) {
      heard = rung;
      notifyGroup(std::nullopt);
    }
    while (heard < rung) {
      // A rank counts its ring, and then writes the group, if it does not die before.
      notifyGroup(board->get(keyOfRing(++heard)));
    }
  }

  // `group`: nullopt for all groups.
  void notifyGroup(const std::optional<std::string>& group) {
    Listeners found;
    {
      LockGuard lock(mutex);
      auto [each, end] =
          group ? listeners.equal_range(*group) : std::pair(listeners.begin(), listeners.end());
      for (; each != end; ++each) {
        found.push_back(each->second);
      }
    }
    notify(found);
  }

  static void notify(const Listeners& found) {
    for (const auto& each : found) {
      if (const auto diagnosis = each.lock()) {
        diagnosis->notice();
      }
    }
  }
};

News::News(const std::string& store, std::shared_ptr<SharedBoard> board)
    : state_(std::make_shared<State>(store, std::move(board))) {
  startDetached("tcpg_store", "its looks for other ranks' questions", [state = state_] {
    try {
      state->run();
    } catch (const std::exception&) {
      // The store ended with the process that serves it. Diagnoses that need the store report that,
      // and other hosts that this host does not answer.
      state->notifyGroup(std::nullopt);
    }
  });
}

News::~News() {
  if (state_->pid != host::processId()) {
    return;  // a forked child; a thread of the parent may have held the lock
  }
  LockGuard lock(state_->mutex);
  state_->stop = true;
  state_->wake.notify_all();
}

void News::listen(uint64_t group, const std::shared_ptr<HangDiagnosis>& diagnosis) {
  LockGuard lock(state_->mutex);
  std::erase_if(state_->listeners, [](const auto& known) { return known.second.expired(); });
  state_->listeners.emplace(std::to_string(group), diagnosis);
  state_->newcomers.push_back(diagnosis);
  state_->wake.notify_all();
}

void News::ring(SharedBoard& board, uint64_t group) {
  const auto count = NewsCount::add(board, NewsCount::kRing);
  board.set(keyOfRing(count.rings), std::to_string(group));
}

void News::ring(uint64_t group) {
  LockGuard lock(state_->mutex);
  state_->rings.push_back(group);
  state_->wake.notify_all();
}

void News::look(uint64_t store) {
  if (store == state_->number) {
    LockGuard lock(state_->mutex);
    state_->told = true;
    state_->wake.notify_all();
  }
}

milliseconds News::slack() const {
  return milliseconds(state_->slackMs);
}

}  // namespace torchcomms_pg::status
