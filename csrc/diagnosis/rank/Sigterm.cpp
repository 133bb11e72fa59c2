#include "diagnosis/rank/Sigterm.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <exception>

#include "base/Thread.hpp"
#include "diagnosis/rank/SignalAction.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg::sigterm {

namespace {

// Interval of looks at which handler the process has.
constexpr std::chrono::milliseconds kLook{500};

enum class Phase : int { idle, arriving, kept, telling, told, passing };

// State that the handler shares with the monitor's thread. The handler uses lock-free atomics and
// async-signal-safe functions alone.
std::atomic<Phase> phase{Phase::idle};
std::atomic<pid_t> owner{0};  // the process that keeps signals; 0 if none does
std::atomic<Clock::rep> keptAt{0};
siginfo_t keptInfo;  // written before `phase` becomes kept

// The handlers that get a signal after this one. A handler that is replaced stays readable, for a
// signal that is being handled.
std::array<struct sigaction, 8> known;
std::atomic<size_t> latest{0};

void (*teller)(const Kept&) = nullptr;  // written before `owner`

void setEarlier(const struct sigaction& action) {
  const auto next = (latest.load() + 1) % known.size();
  known[next] = action;
  latest.store(next, std::memory_order_release);
}

const struct sigaction& earlier() {
  return known[latest.load(std::memory_order_acquire)];
}

// Returns whether this signal needs nothing more now: it is kept, or it is dropped since an earlier
// one is kept.
bool keep(const siginfo_t& info) {
  if (owner.load(std::memory_order_acquire) != getpid()) {
    return false;
  }
  const auto now = Clock::now();
  auto since = Phase::idle;
  if (!monitorComesRound(now)) {
    phase.store(Phase::idle, std::memory_order_release);
    return false;
  }
  if (!phase.compare_exchange_strong(since, Phase::arriving)) {
    if (since == Phase::passing) {
      phase.store(Phase::idle, std::memory_order_release);
    }
    return since != Phase::passing;
  }
  keptInfo = info;
  keptAt.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  phase.store(Phase::kept, std::memory_order_release);
  return true;
}

void passOn(int number, siginfo_t* info, void* context) {
  const auto& action = earlier();
  if (isDefault(action)) {
    owner.store(0, std::memory_order_release);  // the handler is not to be put in front again
    ::signal(number, SIG_DFL);
    raise(number);  // takes effect when this handler returns
  } else if ((action.sa_flags & SA_SIGINFO) != 0) {
    action.sa_sigaction(number, info, context);
  } else if (action.sa_handler != SIG_IGN) {
    action.sa_handler(number);
  }
}

void handle(int number, siginfo_t* info, void* context) {
  const int error = errno;
  if (!keep(*info)) {
    passOn(number, info, context);
  }
  errno = error;
}

void putInFront(const struct sigaction& action) {
  setEarlier(action);
  const auto own = inFrontOf(action, handle);
  struct sigaction replaced = {};
  sigaction(SIGTERM, &own, &replaced);
  if (!has(replaced, handle)) {
    setEarlier(replaced);  // set by the program in this moment
  }
}

// If the program has since set a handler that cannot call this one, puts this handler in front.
void look() {
  struct sigaction current = {};
  sigaction(SIGTERM, nullptr, &current);
  if (isDefault(current) || isPythons(current)) {
    putInFront(current);
  }
}

void begin() {
  phase.store(Phase::telling, std::memory_order_release);
  const Kept kept{
      Clock::time_point(Clock::duration(keptAt.load(std::memory_order_relaxed))),
      isDefault(earlier())};
  startDetached("tcpg_sigterm", [kept] {
    attempt([&] { teller(kept); });  // out of memory, the process says nothing
    auto telling = Phase::telling;
    phase.compare_exchange_strong(telling, Phase::told);
  });
}

// Sends the signal once more, with the sender's number.
void send() {
  phase.store(Phase::passing, std::memory_order_release);
  if (syscall(SYS_rt_sigqueueinfo, getpid(), SIGTERM, &keptInfo) != 0) {
    kill(getpid(), SIGTERM);
  }
}

}  // namespace

void check(Clock::time_point now) noexcept {
  monitorThread.check();
  static Clock::time_point lookedAt GUARDED_BY(monitorThread){};
  if (owner.load(std::memory_order_acquire) != getpid()) {
    return;
  }
  try {
    if (phase.load(std::memory_order_acquire) == Phase::kept) {
      begin();
    }
  } catch (const std::exception&) {
    phase = Phase::told;  // no thread can be started
  }
  const auto at = phase.load(std::memory_order_acquire);
  const Clock::time_point since{Clock::duration(keptAt.load(std::memory_order_relaxed))};
  if (at == Phase::told || (at == Phase::telling && now - since >= kLimit)) {
    send();
  } else if (at == Phase::idle && now - lookedAt >= kLook) {
    lookedAt = now;
    look();
  }
}

void install(void (*tell)(const Kept&)) {
  if (owner == getpid()) {
    return;
  }
  struct sigaction current = {};
  sigaction(SIGTERM, nullptr, &current);
  if (isIgnored(current)) {
    return;
  }
  teller = tell;
  phase = Phase::idle;
  owner = getpid();
  if (!has(current, handle)) {  // a forked child has its parent's handler
    putInFront(current);
  }
}

}  // namespace torchcomms_pg::sigterm
