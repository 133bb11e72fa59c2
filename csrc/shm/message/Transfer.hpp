// One side of a point-to-point message.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "nccl/ElementSize.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg::shm {

struct Transfer;

using TransferList = std::list<std::shared_ptr<Transfer>>;

struct Transfer : Message {
  explicit Transfer(const Message& message) : Message(message) {}

  bool elsewhere = false;  // receives from any rank, maybe of another host

  // Owned by PointToPoint, for a transfer with `done`.
  TransferList::iterator place;
  bool served = false;  // the server moves it if no other thread does
  size_t room = 0;      // of a receive left by mayWait(): its message's bytes in the channel
  ncclResult_t result = ncclSuccess;

  // Owned by MessageEngine, except the atomics.
  uint64_t order = 0;    // position in the order of add()
  bool started = false;  // the buffer may be touched
  bool matched = false;  // a receive has its message, or a send to this rank its receive
  bool passed = false;   // its channel has taken all of a send, or given all of a receive
  uint16_t slot = 0;     // as in MessageHeader
  size_t moved = 0;
  std::unique_ptr<std::byte[]> kept;  // of a receive: content that came before `started`
  std::atomic<int> partner{0};        // `peer`, or the actual sender once it is known
  std::atomic<bool> ended{false};     // set on success only

  size_t bytes() const { return count * elementSize(type); }
  // Returns the same message once more; for a transfer without `done`.
  std::shared_ptr<Transfer> again() const {
    return std::make_shared<Transfer>(static_cast<const Message&>(*this));
  }
};

}  // namespace torchcomms_pg::shm
