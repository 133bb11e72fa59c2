#include "diagnosis/rank/PythonStackDump.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/PerProcess.hpp"
#include "base/Races.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::seconds kMostPatience{2};

// Time after which stacks are read without the GIL: programs often hold it for shorter.
constexpr std::chrono::milliseconds kHeld{200};

// Number of times that the asking thread must have slept to prove that another thread holds the
// GIL. A thread that waits for the GIL wakes every 5 ms (sys.getswitchinterval()) to look for it. A
// thread that gets no CPU neither looks nor sleeps, and proves nothing.
constexpr long kLooks = 20;

// Returns how often a thread of this process has gone to sleep.
long sleepsOf(pid_t thread) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  const std::string field = "voluntary_ctxt_switches:";
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) {
      return std::atol(line.c_str() + field.size());
    }
  }
  return 0;
}

PythonStackDump::Source* source = nullptr;

// The stacks that are read without the GIL, for all who ask.
struct Reading {
  Mutex mutex;
  // The latest one.
  std::optional<std::chrono::steady_clock::time_point> begun GUARDED_BY(mutex);
  bool underWay GUARDED_BY(mutex) = false;
  // Number of times that an asking thread has got the GIL.
  uint64_t holds GUARDED_BY(mutex) = 0;
  std::string lines GUARDED_BY(mutex);  // read since then
};
PerProcess<Reading> reading;

// Forgets what has been read: the GIL has changed hands.
void forgetReading() {
  auto& known = reading.get();
  LockGuard lock(known.mutex);
  ++known.holds;
  known.lines.clear();
}

bool isReading() {
  auto& known = reading.get();
  LockGuard lock(known.mutex);
  return known.underWay;
}

// Starts to read in a separate thread. If no thread can be started, reads in this one, for at most
// a second. Does nothing if a reading has begun within kReading.
void beginReading() {
  auto& known = reading.get();
  UniqueLock lock(known.mutex);
  const auto now = std::chrono::steady_clock::now();
  auto unfinished = ExitGuard::begin();
  if (!unfinished || (known.begun && now - *known.begun < PythonStackDump::kReading)) {
    return;
  }
  known.begun = now;
  known.underWay = true;
  const auto read = [unfinished, &known, holds = known.holds] {
    std::string lines;
    attempt([&] { lines = source->askWithoutGil(); });
    LockGuard locked(known.mutex);
    known.underWay = false;
    if (holds == known.holds) {
      known.lines = std::move(lines);
    } else {
      races::mark(races::Race::gilChangedHands);
    }
  };
  lock.unlock();
  try {
    startDetached("tcpg_stacks", read);
  } catch (const std::system_error&) {
    read();  // no thread can be started
  }
}

}  // namespace

void PythonStackDump::Told::name(Wait& wait) const {
  const auto known = names.find(wait.thread);
  wait.threadName = known == names.end() ? "" : known->second;
}

void PythonStackDump::Told::forgetGone(GroupCounts& counts) const {
  for (auto* const thread :
       {&counts.collectivesThread, &counts.sendsThread, &counts.receivesThread}) {
    if (*thread != 0 && !names.empty() && !names.contains(*thread)) {
      *thread = kAnyThread;
    }
  }
}

struct PythonStackDump::State {
  // The asking thread, and how often it had slept when it began to wait for the GIL. Both are 0
  // before.
  std::atomic<pid_t> thread{0};
  std::atomic<long> slept{0};
  std::atomic<bool> hasGil{false};
  Mutex mutex;
  std::optional<Told> told GUARDED_BY(mutex);
};

void PythonStackDump::setSource(Source set) {
  source = &neverDestroyed<Source>(std::move(set));
}

uint64_t PythonStackDump::mainThread() {
  return source == nullptr ? 0 : source->mainThread;
}

PythonStackDump::PythonStackDump(Stacks stacks)
    : state_(std::make_shared<State>()), begun_(std::chrono::steady_clock::now()) {
  const auto none = std::vector<std::string>(stacks.size());
  if (source == nullptr) {
    state_->told = Told{"", none};
    return;
  }
  auto unfinished = ExitGuard::begin();
  if (!unfinished) {
    state_->told = Told{"Python ends", none};
    return;
  }
  try {
    startDetached(
        "tcpg_python", [unfinished, state = state_, stacks = std::move(stacks)]() mutable {
          Told told;  // empty if memory is short
          attempt([&] {
            state->slept = sleepsOf(gettid());
            state->thread = gettid();
            told = source->ask(stacks, [&] {
              state->hasGil = true;
              forgetReading();
            });
          });
          stacks.clear();
          LockGuard lock(state->mutex);
          state->told = std::move(told);
        });
  } catch (const std::system_error&) {
    beginReading();
    const auto seen = seenWithoutGil();
    state_->told = Told{
        "no thread can be started to ask Python" + (seen.empty() ? "" : "; its stacks:\n" + seen),
        none};
  }
}

bool PythonStackDump::answered() const {
  LockGuard lock(state_->mutex);
  return state_->told.has_value();
}

bool PythonStackDump::ready() const {
  if (answered()) {
    return true;
  }
  const auto waited = std::chrono::steady_clock::now() - begun_;
  const bool held = waited >= kHeld && gilIsHeld();
  if (held) {
    beginReading();
  }
  return waited >= kMostPatience || (waited >= kPatience && held && !isReading());
}

bool PythonStackDump::gilIsHeld() const {
  const auto thread = state_->thread.load();
  return thread != 0 && !state_->hasGil && sleepsOf(thread) - state_->slept >= kLooks;
}

PythonStackDump::Told PythonStackDump::tell() const {
  {
    LockGuard lock(state_->mutex);
    if (state_->told) {
      return *state_->told;
    }
  }
  const char* const why =
      gilIsHeld() ? "a thread holds the GIL and does not give it back, most likely in native code"
      : state_->hasGil ? "Python has not told its stacks in time"
                       : "a thread holds the GIL, or this process gets too little CPU time to ask";
  const auto seen = seenWithoutGil();
  return {why + (seen.empty() ? "" : "; Python's stacks:\n" + seen), {}};
}

std::string PythonStackDump::seenWithoutGil() {
  auto& known = reading.get();
  LockGuard lock(known.mutex);
  return known.lines;
}

}  // namespace torchcomms_pg
