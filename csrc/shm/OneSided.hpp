// One-sided operations: puts, signals, and waits for signals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torchcomms_pg::shm {

struct MappedWindow;

// Value of sigIdx with which a putSignal sends no signal. NCCL has no such value.
inline constexpr int kNoSignal = -1;

// A put of data into a peer's window, a signal to the peer, or a put and then a signal.
struct Put {
  int peer = 0;
  std::shared_ptr<const MappedWindow> window;  // null if no data is put
  size_t offset = 0;                           // in the peer's window, in bytes
  const void* data = nullptr;
  size_t bytes = 0;
  int signal = kNoSignal;
};

struct SignalWait {
  struct Signals {
    int peer;
    int signal;
    uint64_t count;  // to wait for; Windows::expect() makes it the total since the first signal
  };
  std::vector<Signals> all;
};

}  // namespace torchcomms_pg::shm
