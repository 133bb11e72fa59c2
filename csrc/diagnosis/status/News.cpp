#include "diagnosis/status/News.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <map>
#include <optional>
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

// Time after which a ring without a group is skipped: a rank may die after it has counted its ring,
// and before it has written the group.
constexpr milliseconds kRinging{3000};

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

// Has the other processes of the folder look into the store. Waits for none of them: a stopped
// process looks when it goes on. Raises the folder's errors.
void passOn(const Folder& folder, uint64_t store) {
  const auto question = aboutNews(store);
  const auto own = Folder::own().name;
  for (const auto& entry : folder.entries()) {
    const auto socket = entry.name == own ? FileDescriptor() : folder.connect(entry);
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

  // State of the thread. The counts are of news that this process has handled.
  std::optional<Folder> folder;  // empty without a status server
  // The folder for which this process has had its turn, "" without one.
  std::optional<std::string> entered;
  int64_t passed = 0;                        // rings, for the host's other processes
  int64_t heard = 0;                         // rings, for this process
  int64_t answered = 0;                      // questions
  std::optional<Clock::time_point> missing;  // since when the next ring has no group

  // Looks until `stop`. Raises the errors of the store and of the folder.
  void run() {
    // Another process of the host looks from the end of this function on, however it ends.
    struct Leaving {
      const std::string& name;
      ~Leaving() { turns().leave(name); }
    } leaving{name};
    heard = NewsCount::add(*board, 0).rings;
    Clock::time_point checked{};
    bool looks = false;
    UniqueLock lock(mutex);
    while (!stop) {
      const auto due = std::exchange(rings, {});
      const bool now = std::exchange(told, false) || !due.empty() || missing;
      lock.unlock();
      for (const auto group : due) {
        const auto count = NewsCount::add(*board, NewsCount::kRing);
        board->set(keyOfRing(count.rings), std::to_string(group));
      }
      if (const auto time = Clock::now(); time - checked >= kBetweenTurns) {
        checked = time;
        looks = isLooker();
      }
      const auto interval = looks || now ? look(looks && folder) : kBetweenTurns;
      lock.lock();
      wake.wait_for(lock, looks ? interval : kBetweenTurns, [&]() REQUIRES(mutex) {
        return stop || told || !rings.empty();
      });
    }
  }

  // Returns whether this process looks unasked.
  bool isLooker() {
    const auto path = StatusServer::runs() ? StatusServer::folder() : "";
    if (path.empty()) {
      folder.reset();
    } else if (!folder || folder->path() != path) {
      folder.emplace(path);
    }
    const bool looks = !folder || turns().have(*folder, name);
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
    if (forHost && count.rings > std::exchange(passed, count.rings)) {
      passOn(*folder, number);
    }
    hear(count.rings);
    if (forHost && count.questions > std::exchange(answered, count.questions)) {
      const auto answer = std::to_string(count.questions) + " " + encode(gather(*folder, kGather));
      board->set(keyOfAnswer(ownPlace()), answer);
    }
    return count.interval();
  }

  void hear(int64_t rung) {
    for (; heard < rung; ++heard) {
      const auto group = board->get(keyOfRing(heard + 1));
      const auto now = Clock::now();
      if (!group && now - missing.value_or(now) < kRinging) {
        missing = missing.value_or(now);
        return;
      }
      missing.reset();
      notify(group.value_or(""));
    }
  }

  void notify(const std::string& group) {
    std::vector<std::shared_ptr<HangDiagnosis>> found;
    {
      LockGuard lock(mutex);
      for (auto [each, end] = listeners.equal_range(group); each != end; ++each) {
        if (auto diagnosis = each->second.lock()) {
          found.push_back(std::move(diagnosis));
        }
      }
    }
    for (const auto& diagnosis : found) {
      diagnosis->notice();
    }
  }
};

News::News(const std::string& store, std::shared_ptr<SharedBoard> board)
    : state_(std::make_shared<State>(store, std::move(board))) {
  startDetached("tcpg_store", "its looks for other ranks' questions", [state = state_] {
    try {
      state->run();
    } catch (const std::exception&) {
      // The store ended with the process that serves it, or no descriptor is free. Diagnoses that
      // need the store report that, and other hosts that this host does not answer.
    }
  });
}

News::~News() {
  if (state_->pid != host::processId()) {
    return;  // a forked child; a thread of the parent may have held the lock
  }
  {
    LockGuard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
}

void News::listen(uint64_t group, const std::shared_ptr<HangDiagnosis>& diagnosis) {
  LockGuard lock(state_->mutex);
  std::erase_if(state_->listeners, [](const auto& known) { return known.second.expired(); });
  state_->listeners.emplace(std::to_string(group), diagnosis);
}

void News::ring(uint64_t group) {
  {
    LockGuard lock(state_->mutex);
    state_->rings.push_back(group);
  }
  state_->wake.notify_all();
}

void News::look(uint64_t store) {
  if (store != state_->number) {
    return;
  }
  {
    LockGuard lock(state_->mutex);
    state_->told = true;
  }
  state_->wake.notify_all();
}

milliseconds News::slack() const {
  return milliseconds(state_->slackMs);
}

}  // namespace torchcomms_pg::status
