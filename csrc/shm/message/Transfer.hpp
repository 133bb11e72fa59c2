// One side of a point-to-point message.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "nccl/Library.hpp"

namespace torchcomms_pg::shm {

struct Transfer;

using TransferList = std::list<std::shared_ptr<Transfer>>;

struct Transfer : Message {
  explicit Transfer(const Message& message) : Message(message) {}

  bool elsewhere = false;  // whether a receive from any rank may get a message of another host

  // Used by PointToPoint, for a transfer with `done`.
  TransferList::iterator place;
  bool served = false;  // whether the server moves it if no other thread does
  size_t room = 0;      // bytes of the channel that mayWait() counts for a receive, else 0
  ncclResult_t result = ncclSuccess;

  // Used by MessageEngine; any thread may read the atomics.
  uint64_t order = 0;    // position in the order of add()
  bool started = false;  // whether the engine may touch the buffer
  bool matched = false;  // whether a receive has a message, or a send to this rank has a receive
  bool passed = false;   // whether all content is written to the channel, or read from it
  uint16_t slot = 0;     // as in MessageHeader
  size_t moved = 0;
  std::unique_ptr<std::byte[]> kept;  // content that a receive got before `started`, else null
  std::atomic<int> partner{0};        // `peer`, or the actual sender once it is known
  std::atomic<bool> ended{false};     // set on success only

  size_t bytes() const { return count * elementSize(type); }
  // Returns a new transfer of the same message. Only for a transfer without `done`.
  std::shared_ptr<Transfer> again() const {
    return std::make_shared<Transfer>(static_cast<const Message&>(*this));
  }
};

}  // namespace torchcomms_pg::shm
