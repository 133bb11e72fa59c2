// A handler that goes in front of a process's earlier one.
#pragma once

#include <signal.h>

namespace torchcomms_pg {

inline bool isDefault(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

inline bool isIgnored(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_IGN;
}

inline bool has(const struct sigaction& action, void (*handler)(int, siginfo_t*, void*)) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == handler;
}

// Returns whether the action is `interpreters`, the handler by which Python calls the program's;
// null if that is not known.
inline bool isPythons(const struct sigaction& action, void (*interpreters)(int)) {
  return interpreters != nullptr && (action.sa_flags & SA_SIGINFO) == 0 &&
         action.sa_handler == interpreters;
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
