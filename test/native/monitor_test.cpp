// The process's one monitor thread.
#include <atomic>
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
#include "monitor/HeldApart.hpp"
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
  void giveUp(const char* why) noexcept override {
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

TEST(watchedObjectsAreCheckedUntilTheyAreRemoved) {
  Counting first;
  Monitor::get().add(&first);
  first.await(2);
  {
    Counting second;
    Monitor::get().add(&second);
    second.await(2);
    Monitor::get().remove(&second);
  }  // a later check of it would be seen by the sanitizers
  first.await(6);
  Monitor::get().remove(&first);
}

TEST(monitorThreadLivesNoLongerThanWhatItWatches) {
  for (int round = 0; round < 3; ++round) {
    Counting watched;
    Monitor::get().add(&watched);
    watched.await(1);
    CHECK(monitorThreadExists());
    Monitor::get().remove(&watched);
    // The thread has been joined; the kernel may take a moment to forget it.
    while (monitorThreadExists()) std::this_thread::yield();
  }
}

TEST(addingAndRemovingFromManyThreadsIsSafe) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 20; ++i) {
        Counting watched;
        Monitor::get().add(&watched);
        Monitor::get().remove(&watched);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(failuresAreThoseOfTheWatchedObjectsThatHaveFailed) {
  Counting failed;
  Counting healthy;
  Monitor::get().add(&failed);
  Monitor::get().add(&healthy);
  CHECK(Monitor::get().failures().empty());
  failed.giveUp("lost a rank");
  CHECK(Monitor::get().failures() == std::vector<std::string>{"lost a rank"});
  Monitor::get().remove(&failed);
  CHECK(Monitor::get().failures().empty());
  Monitor::get().remove(&healthy);
}

TEST(watchedObjectsAreToldToGiveUp) {
  Counting first;
  Counting second;
  Monitor::get().add(&first);
  Monitor::get().add(&second);
  Monitor::get().remove(&second);
  Monitor::get().giveUp("a test");
  Monitor::get().remove(&first);
  CHECK(first.why() == "a test");
  CHECK(second.why().empty());
}

TEST(whatTheMonitorLooksAtDoesNotEndInItsThread) {
  std::promise<std::thread::id> ended;
  struct Looked : Counting {
    explicit Looked(std::promise<std::thread::id>& ended) : ended(ended) {
      Monitor::get().add(this);
    }
    ~Looked() override {
      Monitor::get().remove(this);
      ended.set_value(std::this_thread::get_id());
    }
    std::promise<std::thread::id>& ended;
  };
  struct Looking : Counting {
    void check(Monitor::Clock::time_point now) noexcept override {
      thread = std::this_thread::get_id();
      if (last) {
        std::vector<std::shared_ptr<Looked>> all{std::exchange(last, nullptr)};
        const torchcomms_pg::HeldApart<Looked> held(std::move(all));
      }
      Counting::check(now);
    }
    std::thread::id thread;
    std::shared_ptr<Looked> last;
  };
  Looking looking;
  looking.last = std::make_shared<Looked>(ended);
  Monitor::get().add(&looking);
  looking.await(2);  // the monitor comes round again
  CHECK(ended.get_future().get() != looking.thread);
  Monitor::get().remove(&looking);
}
