// Processes: identity, life signs, and forks.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg::shm {

uint32_t processId();

// When process `pid` was started, in clock ticks since boot: together with the
// pid it identifies a process, because pids are reused. 0 if there is no such
// process or it is a zombie.
uint64_t processStartTime(uint32_t pid);

// `startTime` 0 means unknown.
bool processAlive(uint32_t pid, uint64_t startTime);

// Differs between a process and its forks.
uint32_t forkGeneration();

std::string hostName();
uint64_t bootHash();
uint32_t pidSpace();  // identifies the pid namespace

uint64_t hashBytes(const void* data, size_t bytes);

}  // namespace torchcomms_pg::shm
