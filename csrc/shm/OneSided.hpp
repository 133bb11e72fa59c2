// One-sided operations: puts, signals, and the wait for signals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torchcomms_pg::shm {

struct MappedWindow;

// Value of sigIdx for a putSignal without a signal; an extension of NCCL.
inline constexpr int kNoSignal = -1;

// Content, a signal, or content followed by a signal.
struct Put {
  int peer = 0;
  std::shared_ptr<const MappedWindow> window;  // null if there is no content
  size_t offset = 0;                           // in bytes
  const void* data = nullptr;
  size_t bytes = 0;
  int signal = kNoSignal;
};

struct SignalWait {
  struct Signals {
    int peer;
    int signal;
    uint64_t count;  // to wait for; after Windows::expect(), counted from the peer's first signal
  };
  std::vector<Signals> all;
};

}  // namespace torchcomms_pg::shm
