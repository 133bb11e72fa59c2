#include "gloo/GroupFailure.hpp"

#include <algorithm>
#include <future>
#include <iterator>
#include <thread>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/SharedPatience.hpp"
#include "base/StorePlace.hpp"
#include "base/StoreValue.hpp"
#include "base/Thread.hpp"
#include "host/Interrupt.hpp"
#include "monitor/Apart.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Store key of the group's failure. The rank that fails the group sets it.
constexpr const char* kReasonKey = "failed";

// Times in awaitReason(). kReasonLook: interval between looks. kReasonPatience: time limit;
// connections may break before the reason can be read. kAnswerPatience: time limit if the store is
// gone, or if a rank has not answered, which looks within about a second (Announcements::slack).
constexpr std::chrono::milliseconds kReasonLook{50};
constexpr std::chrono::milliseconds kReasonPatience{2000};
constexpr std::chrono::milliseconds kAnswerPatience{5000};

// Time limit of awaitTold() and write(), shared by all groups.
SharedPatience tellPatience{std::chrono::seconds(5)};

// Store keys: the first asks `rank` whether it still runs; `rank` sets the second to answer.
std::string questionTo(int rank) {
  return "asked/" + std::to_string(rank);
}
std::string answerOf(int rank) {
  return "there/" + std::to_string(rank);
}

}  // namespace

template <class... Args>
void GroupFailure::call(std::function<void(Args...)> Actions::* which, Args... args) {
  std::shared_ptr<const std::vector<Watcher>> watchers;
  {
    LockGuard lock(mutex_);
    watchers = watchers_;
  }
  for (const auto& watcher : *watchers) {
    // Locks an owner only if the action exists: if this becomes the owner's last reference, this
    // thread destroys the owner.
    const auto& action = watcher.actions.*which;
    if (const auto owner = action ? watcher.owner.lock() : nullptr) {
      attempt([&] { action(args...); });
    }
  }
}

std::optional<host::NcclError> GroupFailure::known() const {
  LockGuard lock(mutex_);
  return failure_;
}

void GroupFailure::check() const {
  if (const auto failure = known()) throw *failure;
}

void GroupFailure::fail(const host::NcclError& failure) {
  {
    LockGuard lock(mutex_);
    if (failure_) {
      return;
    }
    failure_.emplace(failure);
  }
  call(&Actions::release);
  try {
    // Runs in another thread, since the store may block.
    Monitor::get().runDetached(
        [unfinished = ExitGuard(), self = shared_from_this()] { self->tellOthers(); });
  } catch (const std::exception&) {
    // Out of memory: the other ranks notice only broken connections.
    LockGuard lock(mutex_);
    told_ = true;
    changed_.notify_all();
  }
}

void GroupFailure::lookForSignals() {
  if (host::interrupted()) {
    failInterrupted();
  }
}

void GroupFailure::failInterrupted() {
  fail(host::interruption(rank_));
}

void GroupFailure::failWithoutThread(const std::string& name, const std::system_error& error) {
  fail(
      {ncclSystemError,
       name + " cannot be connected: no thread can be started (" + error.what() + ")",
       {rank_}});
}

void GroupFailure::raiseFor(const host::NcclError& inside, const std::vector<int>& members) {
  check();
  adopt(inside, members);
  throw *known();
}

void GroupFailure::adopt(const host::NcclError& inside, const std::vector<int>& members) {
  // If the group's failure has caused `inside`, the text of `inside` is the group's failure,
  // encoded by Comm::make().
  if (failAsTold(inside.what())) {
    return;
  }
  std::vector<int> ranks;
  for (const int rank : inside.ranks) {
    ranks.push_back(members[rank]);
  }
  fail({inside.result, inside.what(), std::move(ranks)});
}

void GroupFailure::write(std::string key, std::string text) {
  try {
    // If it raises, the store is gone, so that no rank can read the key.
    const auto written = apart([unfinished = ExitGuard(), self = shared_from_this(),
                                key = std::move(key), text = std::move(text)] {
      self->inStore([&](auto& group) { group.set(key, text); });
      self->announce();
    });
    tellPatience.spend([&](std::chrono::milliseconds patience) {
      return written.wait_for(patience) == std::future_status::ready;
    });
  } catch (const std::exception&) {
    // No thread can be started.
  }
}

void GroupFailure::announceBy(Announcements by) {
  bool due = false;
  {
    LockGuard lock(mutex_);
    announcements_ = by;
    due = std::exchange(unannounced_, false);
  }
  if (due) {
    attempt([&] { by.announce(); });  // if the store is gone, no rank can read the news
  }
}

void GroupFailure::announce() {
  std::function<void()> announce;
  {
    LockGuard lock(mutex_);
    announce = announcements_.announce;
    unannounced_ = !announce;
  }
  if (announce) {
    announce();
  }
}

void GroupFailure::inStore(const std::function<void(c10d::Store& group)>& body) const {
  decltype(Announcements::call) call;
  {
    LockGuard lock(mutex_);
    call = announcements_.call;
  }
  if (!call) {
    body(*store_);
    return;
  }
  call([&](c10d::Store& job) {
    c10d::PrefixStore group(
        StorePlace(store_).prefix(), c10::intrusive_ptr<c10d::Store>::reclaim_copy(&job));
    body(group);
  });
}

std::chrono::milliseconds GroupFailure::answerPatience() const {
  LockGuard lock(mutex_);
  return kAnswerPatience + (announcements_.slack ? announcements_.slack() : kAnswerPatience * 0);
}

bool GroupFailure::failAsTold(const std::string& told) {
  const auto failure = host::decode(told);
  if (failure) {
    fail({ncclRemoteError, failure->what(), failure->ranks});
  }
  return failure.has_value();
}

bool GroupFailure::failAsWritten(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) {
    return false;
  }
  const auto text = store.get(key);
  return failAsTold({text.begin(), text.end()});
}

bool GroupFailure::failAsOthers(c10d::Store& store) {
  try {
    return failAsWritten(store, kReasonKey);
  } catch (const std::exception&) {
    return false;  // the process that served the store has ended
  }
}

std::optional<GroupFailure::Lost> GroupFailure::awaitReason(
    const std::vector<int>& ranks, bool ask) {
  using Clock = std::chrono::steady_clock;
  Lost lost;
  const auto reachingStore = [&](const auto& body) {
    try {
      body();
    } catch (const std::exception&) {
      lost.store = false;  // the process that served the store has ended
    }
  };
  const auto look = [&](bool first) {
    call(&Actions::learn, first);
    for (const int rank : ranks) {
      const auto death = known() ? "" : died_(rank);
      if (!death.empty()) {
        fail({ncclRemoteError, death, {rank}});
      }
    }
    if (known() || !lost.store) {
      return;
    }
    reachingStore([&] {
      inStore([&](auto& group) {
        if (!failAsWritten(group, kReasonKey)) {
          std::erase_if(lost.silent, [&](int rank) { return group.check({answerOf(rank)}); });
        }
      });
    });
  };
  if (ask) {
    lost.silent = ranks;
    reachingStore([&] {
      inStore([&](auto& group) {
        for (const int rank : ranks) {
          group.set(questionTo(rank), std::vector<uint8_t>{});
        }
      });
      announce();
    });
  }
  const auto begun = Clock::now();
  for (bool first = true;; first = false) {
    look(first);
    if (known()) {
      return std::nullopt;
    }
    // Without the store, the reason arrives only over a connection of this rank or of another rank
    // on this host.
    const bool waits = !lost.store || !lost.silent.empty();
    if (Clock::now() - begun >= (waits ? answerPatience() : kReasonPatience)) {
      break;
    }
    std::this_thread::sleep_for(kReasonLook);
  }
  if (!lost.store) {
    lost.silent.clear();
  }
  return lost;
}

void GroupFailure::answer(c10d::Store& group) const {
  if (group.check({questionTo(rank_)})) {
    group.set(answerOf(rank_), std::vector<uint8_t>{});
  }
}

void GroupFailure::tellOthers() {
  call(&Actions::tell);
  // If this raises, the other ranks notice only broken connections.
  attempt([&] {
    const std::string text = host::encode(*known());
    bool first = false;  // the first reason stays: two ranks may fail at once
    inStore([&](auto& group) { first = claimIn(group, kReasonKey, text) == text; });
    if (first) {
      announce();
    }
  });
  {
    LockGuard lock(mutex_);
    told_ = true;
  }
  changed_.notify_all();
  call(&Actions::told);
}

void GroupFailure::watch(const std::shared_ptr<void>& owner, Actions actions) {
  auto watchers = std::make_shared<std::vector<Watcher>>();
  std::shared_ptr<const std::vector<Watcher>> former;  // freed after the lock is released
  LockGuard lock(mutex_);
  std::ranges::copy_if(*watchers_, std::back_inserter(*watchers), [](const Watcher& known) {
    return !known.owner.expired();
  });
  watchers->push_back({owner, std::move(actions)});
  former = std::exchange(watchers_, std::move(watchers));
}

void GroupFailure::awaitTold() {
  UniqueLock lock(mutex_);
  tellPatience.spend([&](std::chrono::milliseconds patience) {
    return changed_.wait_for(lock, patience, [&]() REQUIRES(mutex_) { return !failure_ || told_; });
  });
}

}  // namespace torchcomms_pg::gloo
