#include "diagnosis/watch/Bell.hpp"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "diagnosis/store/StoreBoard.hpp"
#include "diagnosis/store/StorePlace.hpp"

namespace torchcomms_pg {

namespace {

// Interval at which each rank of the job looks into the store.
constexpr std::chrono::milliseconds kBetweenLooks{1000};

// Number of looks after which a ring without a group is skipped: a rank may die after it has
// counted its ring, and before it has written the group.
constexpr int kPatienceInLooks = 3;

constexpr const char* kCount = "torchcomms_pg/watch/rings";

std::string keyOfRing(int64_t number) {
  return "torchcomms_pg/watch/ring/" + std::to_string(number);
}

}  // namespace

struct Bell::State {
  Mutex mutex;
  std::condition_variable wake;
  // By group.
  std::multimap<std::string, std::weak_ptr<HangDiagnosis>> listeners GUARDED_BY(mutex);
  std::vector<uint64_t> rings GUARDED_BY(mutex);  // groups to ring for
  bool stop GUARDED_BY(mutex) = false;

  // State of the bell's thread.
  int64_t heard = 0;  // number of rings that were handled
  int missed = 0;     // number of looks at which the next ring had no group

  void run(SharedBoard& board) {
    heard = board.add(kCount, 0);
    UniqueLock lock(mutex);
    while (!stop) {
      const auto due = std::exchange(rings, {});
      lock.unlock();
      for (const auto group : due) {
        board.set(keyOfRing(board.add(kCount, 1)), std::to_string(group));
      }
      look(board);
      lock.lock();
      wake.wait_for(lock, kBetweenLooks, [&]() REQUIRES(mutex) { return stop || !rings.empty(); });
    }
  }

  void look(SharedBoard& board) {
    for (const auto count = board.add(kCount, 0); heard < count; ++heard) {
      const auto group = board.get(keyOfRing(heard + 1));
      if (!group && ++missed < kPatienceInLooks) {
        return;
      }
      missed = 0;
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

std::shared_ptr<Bell> Bell::of(const c10::intrusive_ptr<c10d::Store>& store) {
  static PerProcess<PerStore<Bell>> ofProcess;
  const auto shared = StorePlace(store).store;
  return ofProcess.get().of(shared, [&] { return std::make_shared<Bell>(shared); });
}

Bell::Bell(c10::intrusive_ptr<c10d::Store> store) : state_(std::make_shared<State>()) {
  startDetached(
      "tcpg_bell", "the watch over groups", [state = state_, board = StoreBoard(store)]() mutable {
        try {
          state->run(board);
        } catch (const std::exception&) {
          // The store ended with the process that serves it. Diagnoses that need the store report
          // this.
        }
      });
}

Bell::~Bell() {
  {
    LockGuard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
}

void Bell::listen(uint64_t group, const std::shared_ptr<HangDiagnosis>& diagnosis) {
  LockGuard lock(state_->mutex);
  std::erase_if(state_->listeners, [](const auto& known) { return known.second.expired(); });
  state_->listeners.emplace(std::to_string(group), diagnosis);
}

void Bell::ring(uint64_t group) {
  {
    LockGuard lock(state_->mutex);
    state_->rings.push_back(group);
  }
  state_->wake.notify_all();
}

}  // namespace torchcomms_pg
