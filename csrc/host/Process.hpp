// Identity of processes, whether they live, and forks.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg::host {

uint32_t processId();

// Returns the start time of process `pid`, in clock ticks since boot, or 0 if unknown. Start time
// and pid together identify a process, because pids are reused.
uint64_t processStartTime(uint32_t pid);

// Returns false only if the process has certainly ended: no process has this pid, or only a zombie
// or a process that did not start at `startTime` (0 if unknown). If /proc reports nothing, because
// of hidepid or because no descriptor is free, a process counts as alive while its pid is taken.
bool processAlive(uint32_t pid, uint64_t startTime);

// Returns the state of process `pid` as in proc(5), such as 'T' if stopped, or '\0' if unknown.
char processState(uint32_t pid);

// Returns whether process `pid` is stopped, by a signal or a debugger.
inline bool processStopped(uint32_t pid) {
  const char state = processState(pid);
  return state == 'T' || state == 't';
}

// Returns whether the process at the other end of a Unix socket belongs to this user. `pid`, unless
// null, receives its pid.
bool isOfThisUser(int socket, uint32_t* pid = nullptr);

// Returns a number that differs between a process and its forks.
uint32_t forkGeneration();

std::string hostName();
uint64_t bootHash();
uint32_t pidSpace();  // identifies the pid namespace

uint64_t hashBytes(const void* data, size_t bytes);

}  // namespace torchcomms_pg::host
