// Processes: identity, life signs, and forks.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg::host {

uint32_t processId();

// When process `pid` was started, in clock ticks since boot: together with the
// pid it identifies a process, because pids are reused. 0: unknown.
uint64_t processStartTime(uint32_t pid);

// False only for what has certainly ended: no process has the number, or a zombie
// or one that was started at another time than `startTime` (0: unknown) has it. A
// process of which /proc tells nothing, for want of a free descriptor or by
// hidepid, lives as long as its number is taken.
bool processAlive(uint32_t pid, uint64_t startTime);

// As in proc(5), such as 'T' for a stopped process; '\0': unknown.
char processState(uint32_t pid);

// Differs between a process and its forks.
uint32_t forkGeneration();

std::string hostName();
uint64_t bootHash();
uint32_t pidSpace();  // identifies the pid namespace

uint64_t hashBytes(const void* data, size_t bytes);

}  // namespace torchcomms_pg::host
