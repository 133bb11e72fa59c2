// What the handlers of SIGTERM and SIGABRT share, which go in front of a process's earlier ones.
#pragma once

#include <signal.h>

#include <atomic>
#include <chrono>

#include "monitor/Monitor.hpp"

namespace torchcomms_pg {

// The handler that the interpreter installs for every signal that it handles, by which Python calls
// the program's; null if that is not known.
inline std::atomic<void (*)(int)> interpretersHandler{nullptr};

// Returns whether the monitor comes round. No signal is kept otherwise: the monitor may be stuck.
inline bool monitorComesRound(Monitor::Clock::time_point now) {
  return now - Monitor::get().lastRound() <= std::chrono::seconds(1);
}

inline bool isDefault(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

inline bool isIgnored(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_IGN;
}

inline bool has(const struct sigaction& action, void (*handler)(int, siginfo_t*, void*)) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == handler;
}

inline bool isPythons(const struct sigaction& action) {
  const auto known = interpretersHandler.load();
  return known != nullptr && (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == known;
}

// Returns `handler` with the flags and the mask of the action that gets the signal next, so that
// system calls are interrupted as before.
inline struct sigaction inFrontOf(
    const struct sigaction& action, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction own = {};
  own.sa_sigaction = handler;
  own.sa_mask = action.sa_mask;
  own.sa_flags = SA_SIGINFO | (action.sa_flags & (SA_RESTART | SA_ONSTACK | SA_NODEFER));
  return own;
}

}  // namespace torchcomms_pg
