// SIGTERM is kept for at most a second, in which the process says what it waits for. Independent of
// torch.
#pragma once

#include <signal.h>

#include <chrono>

namespace torchcomms_pg::sigterm {

using Clock = std::chrono::steady_clock;

// Limit of the time for which a signal is kept. A second signal in that time is dropped, since the
// first one is going to be passed on.
inline constexpr std::chrono::milliseconds kLimit{900};

// What is known of a signal that is kept.
struct Kept {
  Clock::time_point at;
  bool ends = false;  // true if the signal's default action will end the process
};

// Puts a handler in front of this process's handler of SIGTERM, or its default action. While the
// monitor runs, the handler keeps a signal, and check() calls `tell` in a separate thread and
// then sends the signal once more, which the earlier handler gets. While the monitor does not run,
// and in a forked child, the earlier handler gets the signal at once. If the program sets Python's
// handler or the default action after install(), the monitor puts itself in front of it again. It
// leaves other handlers alone: one of them may call the handler of install(). Does nothing if the
// process ignores SIGTERM. Idempotent; for one thread at a time.
void install(void (*tell)(const Kept&));

// Does what is due. The monitor's thread calls it in each of its rounds.
void check(Clock::time_point now) noexcept;

}  // namespace torchcomms_pg::sigterm
