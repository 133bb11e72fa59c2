// The process's one monitor thread.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "Check.hpp"
#include "monitor/Monitor.hpp"

using torchcomms_pg::Monitor;

namespace {

class Counting : public Monitor::Watched {
 public:
  void check(Monitor::Clock::time_point) noexcept override {
    std::lock_guard lock(mutex_);
    ++checks_;
    changed_.notify_all();
  }
  void abortInFlight(const char* why) noexcept override {
    std::lock_guard lock(mutex_);
    why_ = why;
  }
  std::string failureMessage() const override {
    std::lock_guard lock(mutex_);
    return why_;
  }
  std::string why() const { return failureMessage(); }
  void await(int checks) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return checks_ >= checks; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int checks_ = 0;
  std::string why_;
};

// A sanitizer may have threads of its own, so threads are told by their names.
bool monitorThreadExists() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    if (name == "tcpg_monitor") return true;
  }
  return false;
}

}  // namespace

TEST(watchedObjectsAreCheckedAsLongAsTheyLive) {
  const auto first = Monitor::watch<Counting>();
  first->await(2);
  Monitor::watch<Counting>()->await(2);  // a later check of it would be seen by the sanitizers
  first->await(6);
}

TEST(monitorThreadLivesNoLongerThanWhatItWatches) {
  for (int round = 0; round < 3; ++round) {
    auto watched = Monitor::watch<Counting>();
    watched->await(1);
    CHECK(monitorThreadExists());
    watched.reset();
    // The monitor may have been the last to hold it; and the kernel takes a moment to forget a
    // thread that has been joined.
    while (monitorThreadExists()) std::this_thread::yield();
  }
}

TEST(addingAndRemovingFromManyThreadsIsSafe) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 20; ++i) Monitor::watch<Counting>();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(failuresAreThoseOfTheWatchedObjectsThatHaveFailed) {
  auto failed = Monitor::watch<Counting>();
  const auto healthy = Monitor::watch<Counting>();
  CHECK(Monitor::get().failures().empty());
  failed->abortInFlight("lost a rank");
  CHECK(Monitor::get().failures() == std::vector<std::string>{"lost a rank"});
  const std::weak_ptr<Counting> last = failed;
  failed.reset();
  while (!last.expired()) std::this_thread::yield();  // the monitor may be looking at it
  CHECK(Monitor::get().failures().empty());
}

TEST(onlyAChecksThreadHasTheMonitorsRole) {
  class Asking : public Counting {
   public:
    void check(Monitor::Clock::time_point now) noexcept override {
      had = torchcomms_pg::monitorThread.isMine();
      Counting::check(now);
    }
    std::atomic<bool> had{false};
  };
  const auto watched = Monitor::watch<Asking>();
  watched->await(1);
  CHECK(watched->had);
  CHECK(!torchcomms_pg::monitorThread.isMine());
}

TEST(watchedObjectsAreToldToGiveUp) {
  const auto first = Monitor::watch<Counting>();
  const auto second = Monitor::watch<Counting>();
  Monitor::get().abortInFlight("a test");
  CHECK(first->why() == "a test");
  CHECK(second->why() == "a test");
}

namespace {

// Tells the thread in which an object has ended.
using Ended = std::promise<std::thread::id>;

// A watched object whose last holder lets go of it in one of the monitor's calls, as a program may
// that learns of a failure there.
class LetGo : public Counting {
 public:
  explicit LetGo(std::shared_ptr<Ended> ended) : ended_(std::move(ended)) {}
  ~LetGo() override {
    CHECK(Monitor::get().failures().empty());  // no lock of the monitor is held
    ended_->set_value(std::this_thread::get_id());
  }
  void check(Monitor::Clock::time_point now) noexcept override {
    checker = std::this_thread::get_id();
    if (inCheck) holder = nullptr;
    Counting::check(now);
  }
  void abortInFlight(const char*) noexcept override { holder = nullptr; }

  std::atomic<bool> inCheck{false};
  std::shared_ptr<LetGo> holder;
  std::atomic<std::thread::id> checker;

 private:
  const std::shared_ptr<Ended> ended_;
};

}  // namespace

TEST(theLastHolderMayLetGoOfAWatchedObjectInACheck) {
  const auto other = Monitor::watch<Counting>();
  const auto ended = std::make_shared<Ended>();
  auto* const watched = [&] {
    auto made = Monitor::watch<LetGo>(ended);
    made->holder = made;
    made->await(1);
    return made.get();
  }();
  const auto monitor = watched->checker.load();
  watched->inCheck = true;
  CHECK(ended->get_future().get() != monitor);  // since a destructor may wait for the monitor,
  Monitor::watch<Counting>()->await(1);         // which comes round again
}

TEST(theLastHolderMayLetGoOfAWatchedObjectWhenItGivesUp) {
  const auto ended = std::make_shared<Ended>();
  {
    auto made = Monitor::watch<LetGo>(ended);
    made->holder = made;
  }
  Monitor::get().abortInFlight("a test");
  ended->get_future().wait();
}

TEST(whatEndsWhileTheMonitorLooksAtItEndsInAnotherThread) {
  const auto ended = std::make_shared<Ended>();
  std::promise<void> looking, goOn;
  struct Looked : LetGo {
    Looked(std::shared_ptr<Ended> ended, std::promise<void>& looking, std::future<void> on)
        : LetGo(std::move(ended)), looking(looking), on(std::move(on)) {}
    void check(Monitor::Clock::time_point) noexcept override {
      looking.set_value();
      on.wait();
    }
    std::promise<void>& looking;
    std::future<void> on;
  };
  auto watched = Monitor::watch<Looked>(ended, looking, goOn.get_future());
  looking.get_future().wait();
  watched.reset();  // does not wait for the check
  goOn.set_value();
  ended->get_future().wait();
}
