#include "monitor/PythonStackDump.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::seconds kMostPatience{2};

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

PythonStackDump::Source*& source() {
  static PythonStackDump::Source* set = nullptr;
  return set;
}

}  // namespace

struct PythonStackDump::State {
  // The asking thread, and how often it had slept when it began to wait for the GIL. Both are 0
  // before.
  std::atomic<pid_t> thread{0};
  std::atomic<long> slept{0};
  std::atomic<bool> hasGil{false};
  std::mutex mutex;
  std::optional<Told> told;
};

void PythonStackDump::setSource(Source set) {
  source() = &neverDestroyed<Source>(std::move(set));
}

PythonStackDump::PythonStackDump(Stacks stacks)
    : state_(std::make_shared<State>()), begun_(std::chrono::steady_clock::now()) {
  const auto none = std::vector<std::string>(stacks.size());
  if (source() == nullptr) {
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
          state->slept = sleepsOf(gettid());
          state->thread = gettid();
          auto told = source()->ask(stacks, [&] { state->hasGil = true; });
          stacks.clear();
          std::lock_guard lock(state->mutex);
          state->told = std::move(told);
        });
  } catch (const std::system_error&) {
    const auto seen = seenWithoutGil();
    state_->told = Told{
        "no thread can be started to ask Python" + (seen.empty() ? "" : "; its stacks:\n" + seen),
        none};
  }
}

bool PythonStackDump::answered() const {
  std::lock_guard lock(state_->mutex);
  return state_->told.has_value();
}

bool PythonStackDump::ready() const {
  const auto waited = std::chrono::steady_clock::now() - begun_;
  return answered() || waited >= kMostPatience || (waited >= kPatience && gilIsHeld());
}

bool PythonStackDump::gilIsHeld() const {
  const auto thread = state_->thread.load();
  return thread != 0 && !state_->hasGil && sleepsOf(thread) - state_->slept >= kLooks;
}

PythonStackDump::Told PythonStackDump::tell() const {
  {
    std::lock_guard lock(state_->mutex);
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
  return source() == nullptr ? "" : source()->askWithoutGil();
}

}  // namespace torchcomms_pg
