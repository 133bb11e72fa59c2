// Processes: identity, life signs, and forks.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg::host {

uint32_t processId();

// Returns the start time of process `pid`, in clock ticks since boot; 0: unknown. Identifies a
// process together with the pid, because pids are reused.
uint64_t processStartTime(uint32_t pid);

// Returns false only for a process that has certainly ended: no process has the number, or a zombie
// or one that was started at another time than `startTime` (0: unknown) has it. A process of which
// /proc tells nothing, for want of a free descriptor or by hidepid, lives as long as its number is
// taken.
bool processAlive(uint32_t pid, uint64_t startTime);

// Returns the state as in proc(5), such as 'T' for a stopped process; '\0': unknown.
char processState(uint32_t pid);

// Returns a number that differs between a process and its forks.
uint32_t forkGeneration();

std::string hostName();
uint64_t bootHash();
uint32_t pidSpace();  // identifies the pid namespace

uint64_t hashBytes(const void* data, size_t bytes);

}  // namespace torchcomms_pg::host
