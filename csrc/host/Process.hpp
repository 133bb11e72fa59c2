// Processes: identity, whether they live, and forks.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg::host {

uint32_t processId();

// Returns the start time of process `pid`, in clock ticks since boot, or 0 if unknown. Together
// with the pid it identifies a process, because pids are reused.
uint64_t processStartTime(uint32_t pid);

// Returns false only if the process has certainly ended: no process has this pid, or a zombie has
// it, or a process with a start time other than `startTime` (0 if unknown) has it. If /proc reports
// nothing, for want of a free descriptor or because of hidepid, a process counts as alive while its
// pid is taken.
bool processAlive(uint32_t pid, uint64_t startTime);

// Returns the state as in proc(5), such as 'T' for a stopped process, or '\0' if unknown.
char processState(uint32_t pid);

// Returns a number that differs between a process and its forks.
uint32_t forkGeneration();

std::string hostName();
uint64_t bootHash();
uint32_t pidSpace();  // identifies the pid namespace

uint64_t hashBytes(const void* data, size_t bytes);

}  // namespace torchcomms_pg::host
