#include "diagnosis/group/ProcessTotals.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <list>
#include <utility>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "device/EventPoller.hpp"
#include "diagnosis/group/GroupActivity.hpp"

namespace torchcomms_pg::process_totals {

namespace {

// Limit of the wait for a device: the driver may block a thread for long.
constexpr Milliseconds kPatience{500};

// A group that had not ended at the last look.
struct Known {
  std::shared_ptr<GroupTotals> totals;
  std::shared_ptr<const Lateness> lateness;  // see keepLateness(); or null
};

struct State {
  Mutex mutex;
  int64_t rank GUARDED_BY(mutex) = -1;
  std::vector<Known> groups GUARDED_BY(mutex);
  std::list<Group> ended GUARDED_BY(mutex);  // in the order in which they ended

  Mutex newsMutex;
  std::condition_variable news;
  uint64_t failures GUARDED_BY(newsMutex) = 0;
  uint64_t written GUARDED_BY(newsMutex) = 0;
  bool writing GUARDED_BY(newsMutex) = false;  // whether a writer exists
  bool ending GUARDED_BY(newsMutex) = false;
};
PerProcess<State> state;

void addTo(GroupTotals::Sums& sums, const GroupTotals::Sums& more) {
  sums.operations += more.operations;
  sums.failures += more.failures;
  sums.bytes += more.bytes;
  sums.lasted += more.lasted;
  sums.waited += more.waited;
}

void addTo(Group& group, const Group::Operation& more) {
  const auto known = std::ranges::find(group.operations, more.kind, &Group::Operation::kind);
  if (known == group.operations.end()) {
    group.operations.push_back(more);
  } else {
    addTo(known->sums, more.sums);
  }
}

void addTo(Group& group, const Known& known, Clock::time_point now) {
  const auto& more = *known.totals;
  for (size_t number = 0; number < kOpKinds; ++number) {
    const auto kind = static_cast<OpKind>(number);
    // Skips shrinks: the operation that stands for a shrink covers only the joining of its ranks.
    const auto sums = more.sums(kind);
    if (kind != OpKind::shrink && (sums.operations > 0 || sums.waited.count() > 0)) {
      addTo(group, {kind, sums});
    }
  }
  group.failures += more.failures();
  if (known.lateness) {
    group.lateness = known.lateness->ranks;
  }
  if (const auto inFlight = more.inFlight()) {
    group.inFlight += inFlight;
    group.oldest = std::max(group.oldest, now - more.oldest());
  }
}

// Returns the group of the name and backend of `wanted` in `groups`; adds it if it is missing.
auto find(auto& groups, Group wanted) {
  const auto found = std::ranges::find_if(groups, [&](const Group& group) {
    return group.name == wanted.name && group.backend == wanted.backend &&
           group.watched == wanted.watched;
  });
  return found == groups.end() ? groups.insert(found, std::move(wanted)) : found;
}
auto find(auto& groups, const GroupTotals& of) {
  return find(groups, Group{of.group(), of.backend(), of.watched()});
}

// Moves the sums of ended groups from `groups` to `ended`.
void settle(State& state) REQUIRES(state.mutex) {
  const auto now = Clock::now();
  std::erase_if(state.groups, [&](const Known& group) REQUIRES(state.mutex) {
    const auto& totals = group.totals;
    if (totals.use_count() > 1) {
      return false;
    }
    std::atomic_thread_fence(std::memory_order_acquire);  // makes the last holder's sums visible
    totals->setInFlight(0, {});
    const auto known = find(state.ended, *totals);
    addTo(*known, group, now);
    state.ended.splice(state.ended.end(), state.ended, known);
    return true;
  });
  const auto named = [](const Group& group) { return group.name != kOthers; };
  for (auto left = std::ranges::count_if(state.ended, named); left > int64_t{kEnded}; --left) {
    const auto oldest = std::ranges::find_if(state.ended, named);
    const auto others = find(state.ended, Group{kOthers, oldest->backend, oldest->watched});
    for (const auto& operation : oldest->operations) {
      addTo(*others, operation);
    }
    others->failures += oldest->failures;
    state.ended.erase(oldest);
  }
}

}  // namespace

void add(std::shared_ptr<GroupTotals> totals, int64_t rank) {
  auto& state = process_totals::state.get();
  LockGuard lock(state.mutex);
  settle(state);
  if (state.rank < 0) {
    state.rank = rank;
  }
  state.groups.push_back({std::move(totals), nullptr});
}

void keepLateness(const GroupTotals& group, std::shared_ptr<const Lateness> last) {
  auto& state = process_totals::state.get();
  LockGuard lock(state.mutex);
  for (auto& known : state.groups) {
    if (known.totals.get() == &group) {
      known.lateness = std::move(last);
      return;
    }
  }
}

Totals read() {
  EventPoller::askNow(kPatience);
  const auto active = enlisted();
  auto& state = process_totals::state.get();
  LockGuard lock(state.mutex);
  settle(state);
  Totals totals;
  totals.rank = state.rank;
  totals.groups.assign(state.ended.begin(), state.ended.end());
  const auto now = Clock::now();
  for (const auto& live : state.groups) {
    const auto group = find(totals.groups, *live.totals);
    group->live = true;
    addTo(*group, live, now);
  }
  for (const auto& group : active) {
    if (const auto judged = group->lateness().judged()) {
      find(totals.groups, group->inFlight().totals())->lateness = judged->ranks;
    }
  }
  return totals;
}

void noteFailure() {
  auto& state = process_totals::state.get();
  LockGuard lock(state.newsMutex);
  ++state.failures;
  state.news.notify_all();
}

std::optional<uint64_t> awaitFailure(uint64_t written, Milliseconds patience) {
  auto& state = process_totals::state.get();
  UniqueLock lock(state.newsMutex);
  state.written = written;
  state.writing = !state.ending;
  state.news.notify_all();
  state.news.wait_for(lock, patience, [&]() REQUIRES(state.newsMutex) {
    return state.ending || state.failures > written;
  });
  return state.ending ? std::nullopt : std::optional(state.failures);
}

void endWriter() {
  auto& state = process_totals::state.get();
  LockGuard lock(state.newsMutex);
  state.ending = true;
  state.writing = false;
  state.news.notify_all();
}

void awaitWritten(Milliseconds patience) {
  auto& state = process_totals::state.get();
  UniqueLock lock(state.newsMutex);
  state.news.wait_for(lock, patience, [&]() REQUIRES(state.newsMutex) {
    return !state.writing || state.written >= state.failures;
  });
}

}  // namespace torchcomms_pg::process_totals
