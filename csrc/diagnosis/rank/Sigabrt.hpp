// SIGABRT is kept for at most a second, in which the process says in which operation it ends.
// Independent of torch.
#pragma once

#include <chrono>
#include <string>

namespace torchcomms_pg::sigabrt {

using Clock = std::chrono::steady_clock;

// Limit of the time for which a signal is kept.
inline constexpr std::chrono::milliseconds kLimit{900};

// What is known of a signal that is kept.
struct Kept {
  Clock::time_point at;
  std::string reason;  // type and text of the exception that has ended the process, or ""
};

// Puts a handler in front of this process's handler of SIGABRT, or its default action. While the
// monitor runs, the handler has check() call `tell` in a separate thread, and waits for its end.
// Then the handler restores the earlier one and raises the signal again. While the monitor does not
// run, in a forked child, and for a signal in the thread of the monitor or of `tell`, it does so
// at once. Does nothing if the process ignores the signal or has a handler in Python, which may go
// on. Idempotent; for one thread at a time.
void install(void (*tell)(const Kept&));

// Does what is due. The monitor's thread calls it in each of its rounds.
void check() noexcept;

}  // namespace torchcomms_pg::sigabrt
