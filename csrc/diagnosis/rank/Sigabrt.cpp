#include "diagnosis/rank/Sigabrt.hpp"

#include <cxxabi.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <memory>
#include <typeinfo>
#include <utility>

#include "base/NeverDestroyed.hpp"
#include "base/Thread.hpp"
#include "diagnosis/rank/SignalAction.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg::sigabrt {

namespace {

// Interval of the handler's looks at whether all is told.
constexpr timespec kLook{0, 2'000'000};

// State that the handler shares with the monitor's thread. The handler uses lock-free atomics and
// async-signal-safe functions alone.
std::atomic<pid_t> owner{0};  // the process that keeps signals; 0 if none does
std::atomic<Clock::rep> keptAt{0};
std::atomic<bool> told{false};
std::atomic<pthread_t> monitors{};
std::atomic<pthread_t> tellers{};
struct sigaction earlier;  // written before the handler is installed

// The text of the exception for which the process ends, and std::terminate's earlier handler.
std::string& reason = neverDestroyed<std::string>();
std::atomic<bool> reasonKnown{false};
std::terminate_handler earlierTerminate = nullptr;

void (*teller)(const Kept&) = nullptr;  // written before `owner`

void noteReason() {
  try {
    if (const auto error = std::current_exception()) {
      std::rethrow_exception(error);
    }
  } catch (const std::exception& error) {
    int status = 0;
    const auto* const mangled = typeid(error).name();
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
    reason = std::string(name ? name.get() : mangled) + ": " + error.what();
    reasonKnown.store(true, std::memory_order_release);
  } catch (...) {
    // Has no text.
  }
}

// std::terminate() calls this in the thread of the exception.
void terminate() {
  static std::atomic_flag noted;
  if (owner.load(std::memory_order_acquire) == getpid() && !noted.test_and_set()) {
    noteReason();
  }
  earlierTerminate();
  std::abort();
}

void awaitTold() {
  const auto now = Clock::now();
  const auto self = pthread_self();
  if (owner.load(std::memory_order_acquire) != getpid() || self == monitors || self == tellers ||
      !monitorComesRound(now)) {
    return;
  }
  Clock::rep none = 0;
  keptAt.compare_exchange_strong(none, now.time_since_epoch().count());
  while (!told.load(std::memory_order_acquire) && Clock::now() - now < kLimit) {
    nanosleep(&kLook, nullptr);
  }
}

void handle(int number, siginfo_t* /*info*/, void* /*context*/) {
  const int error = errno;
  awaitTold();
  sigaction(number, &earlier, nullptr);
  raise(number);  // takes effect when this handler returns
  errno = error;
}

void tell(const Kept& kept) {
  tellers = pthread_self();
  attempt([&] { teller(kept); });  // out of memory, the process says nothing
  told.store(true, std::memory_order_release);
}

}  // namespace

void check() noexcept {
  monitorThread.check();
  static bool begun GUARDED_BY(monitorThread) = false;
  monitors = pthread_self();
  const auto at = keptAt.load();
  if (owner.load(std::memory_order_acquire) != getpid() || at == 0 || std::exchange(begun, true)) {
    return;
  }
  try {
    const bool known = reasonKnown.load(std::memory_order_acquire);
    startDetached(
        "tcpg_sigabrt",
        [kept = Kept{Clock::time_point(Clock::duration(at)), known ? reason : ""}] { tell(kept); });
  } catch (const std::exception&) {
    told = true;  // no thread can be started
  }
}

void install(void (*tell)(const Kept&)) {
  if (owner == getpid()) {
    return;
  }
  struct sigaction current = {};
  sigaction(SIGABRT, nullptr, &current);
  if (isIgnored(current) || isPythons(current)) {
    return;
  }
  teller = tell;
  monitors = pthread_t{};  // a forked child has its own
  owner = getpid();
  if (earlierTerminate == nullptr) {
    earlierTerminate = std::get_terminate();
    std::set_terminate(terminate);
  }
  if (!has(current, handle)) {  // a forked child has its parent's handler
    earlier = current;
    const auto own = inFrontOf(current, handle);
    sigaction(SIGABRT, &own, nullptr);
  }
}

}  // namespace torchcomms_pg::sigabrt
