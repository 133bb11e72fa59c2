#include "gloo/Fault.hpp"

#include <thread>
#include <utility>

#include "base/OutstandingTask.hpp"
#include "base/SharedPatience.hpp"
#include "host/FailureText.hpp"
#include "host/Interrupt.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Key under which a rank writes why it has failed the group: the ranks at fault, then the reason.
constexpr const char* kReasonKey = "failed";

// Interval at which a rank that cannot do without the reason looks for it.
constexpr std::chrono::milliseconds kReasonLook{50};

// Time limit of the store's part in a failure.
SharedPatience tellPatience{std::chrono::seconds(5)};

}  // namespace

std::optional<host::NcclError> Fault::known() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Fault::check() const {
  if (const auto failure = known()) throw *failure;
}

void Fault::fail(const host::NcclError& failure) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) {
      return;
    }
    failure_.emplace(failure);
  }
  call(&Actions::release);
  // Runs apart because the store may block.
  Monitor::get().runApart(
      [unfinished = OutstandingTask(), self = shared_from_this()] { self->tellOthers(); });
}

void Fault::lookForSignals() {
  if (host::interrupted()) {
    failInterrupted();
  }
}

void Fault::failInterrupted() {
  fail(host::interruption(rank_));
}

void Fault::failWithoutThread(const std::string& name, const std::system_error& error) {
  fail(
      {ncclSystemError,
       name + " cannot be connected: no thread can be started (" + error.what() + ")",
       {rank_}});
}

void Fault::raiseFor(const host::NcclError& inside, const std::vector<int>& members) {
  check();
  // A failure inside a host after the group's has the group's failure as its text.
  if (const auto told = host::decode(inside.what())) {
    fail(*told);
  } else {
    std::vector<int> ranks;
    for (const int rank : inside.ranks) {
      ranks.push_back(members[rank]);
    }
    fail({inside.result, inside.what(), std::move(ranks)});
  }
  throw *known();
}

void Fault::writeApart(std::string key, std::string text) {
  try {
    Monitor::get().runApart([unfinished = OutstandingTask(),
                             store = store_,
                             key = std::move(key),
                             text = std::move(text)] {
      try {
        store->set(key, text);
        announce(*store);
      } catch (const std::exception&) {
        // The store has gone, and so have the ranks that would have read it.
      }
    });
  } catch (const std::runtime_error&) {
    // No thread can be started.
  }
}

bool Fault::failAsTold(c10d::Store& store, std::chrono::milliseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  std::vector<uint8_t> text;
  try {
    while (!store.check({kReasonKey})) {
      if (known() || std::chrono::steady_clock::now() >= until) {
        return known().has_value();
      }
      std::this_thread::sleep_for(kReasonLook);
    }
    text = store.get(kReasonKey);
  } catch (const std::exception&) {
    return false;  // the store went with the rank that served it
  }
  const auto told = host::decode({text.begin(), text.end()});
  if (told) {
    fail(*told);
  }
  return told.has_value();
}

void Fault::tellOthers() {
  call(&Actions::tell);
  try {
    const std::string text = host::encode(*known());
    if (!store_->check({kReasonKey})) {
      store_->set(kReasonKey, std::vector<uint8_t>(text.begin(), text.end()));
      announce(*store_);
    }
  } catch (const std::exception&) {
    // The others then learn from the broken connection alone.
  }
  {
    std::lock_guard lock(mutex_);
    told_ = true;
  }
  changed_.notify_all();
  call(&Actions::told);
}

void Fault::call(std::function<void()> Actions::* which) {
  std::vector<Watcher> watchers;
  {
    std::lock_guard lock(mutex_);
    watchers = watchers_;
  }
  for (const auto& watcher : watchers) {
    // Holds an owner only for what is called: one that is let go of here ends in this thread.
    const auto& action = watcher.actions.*which;
    if (const auto owner = action ? watcher.owner.lock() : nullptr) {
      action();
    }
  }
}

void Fault::watch(const std::shared_ptr<void>& owner, Actions actions) {
  std::lock_guard lock(mutex_);
  std::erase_if(watchers_, [](const Watcher& watcher) { return watcher.owner.expired(); });
  watchers_.push_back({owner, std::move(actions)});
}

void Fault::awaitTold() {
  std::unique_lock lock(mutex_);
  tellPatience.spend([&](std::chrono::milliseconds patience) {
    return changed_.wait_for(lock, patience, [&] { return !failure_ || told_; });
  });
}

}  // namespace torchcomms_pg::gloo
