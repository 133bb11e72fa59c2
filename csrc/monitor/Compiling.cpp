#include "monitor/Compiling.hpp"

#include <atomic>
#include <deque>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"

namespace torchcomms_pg {

namespace {

constexpr size_t kMaxIntervals = 256;

struct Announcements {
  Mutex mutex;
  int depth GUARDED_BY(mutex) = 0;
  std::optional<Compiling::Clock::time_point> begun GUARDED_BY(mutex);
  std::optional<Compiling::Clock::time_point> ended GUARDED_BY(mutex);
  std::deque<Compiling::Interval> intervals GUARDED_BY(mutex);
};
PerProcess<Announcements> announcements;

std::atomic<Compiling::Milliseconds::rep> compileLimit{0};

int64_t wallClock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Compiling::begin(const std::string& trigger) {
  auto& state = announcements.get();
  LockGuard lock(state.mutex);
  if (++state.depth > 1) {
    return;
  }
  state.begun = Clock::now();
  state.intervals.push_back({trigger, wallClock(), 0});
  if (state.intervals.size() > kMaxIntervals) {
    state.intervals.pop_front();
  }
}

void Compiling::end() {
  auto& state = announcements.get();
  LockGuard lock(state.mutex);
  if (state.depth == 0 || --state.depth > 0) {
    return;  // nested, or a compilation that began before the callbacks were registered
  }
  state.begun.reset();
  state.ended = Clock::now();
  state.intervals.back().end = wallClock();
}

Compiling::State Compiling::state(Clock::time_point now) {
  auto& state = announcements.get();
  LockGuard lock(state.mutex);
  const auto before = [&](const std::optional<Clock::time_point>& then) {
    return then ? std::optional(std::chrono::duration_cast<Milliseconds>(now - *then))
                : std::nullopt;
  };
  return {before(state.begun), before(state.ended)};
}

void Compiling::setLimit(Milliseconds limit) {
  compileLimit.store(limit.count(), std::memory_order_relaxed);
}

Compiling::Milliseconds Compiling::limit() {
  return Milliseconds(compileLimit.load(std::memory_order_relaxed));
}

std::vector<Compiling::Interval> Compiling::intervals() {
  auto& state = announcements.get();
  LockGuard lock(state.mutex);
  return {state.intervals.begin(), state.intervals.end()};
}

}  // namespace torchcomms_pg
