// One side of a point-to-point message.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg::shm {

struct Incoming;
struct Transfer;

using TransferList = std::list<std::shared_ptr<Transfer>>;

struct Transfer : Message {
  Transfer(bool sending, const Message& message) : Message(message), sending(sending) {}

  const bool sending;
  bool elsewhere = false;  // of a receive from any rank: it may be one that is not in this memory

  // With `done`, these belong to PointToPoint.
  TransferList::iterator place;
  ncclResult_t result = ncclSuccess;

  // What follows belongs to MessageEngine, the atomics excepted.
  uint64_t order = 0;    // of its being added
  bool started = false;  // the buffer may be touched
  bool matched = false;  // a receive that knows its message, or a send to oneself its receive
  size_t moved = 0;
  std::shared_ptr<Incoming> message;  // what a matched receive has yet to take, once it is there
  std::atomic<int> partner{0};        // `peer`, or who is found to be the sender
  std::atomic<bool> ended{false};     // successfully

  // The same message once more, of one without `done`.
  std::shared_ptr<Transfer> again() const { return std::make_shared<Transfer>(sending, *this); }
};

// A message that is arriving or has arrived before its receive.
struct Incoming {
  int source = 0;
  int tag = 0;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  uint16_t slot = 0;  // as in MessageHeader
  size_t bytes = 0;
  size_t moved = 0;
  bool arrived = false;
  std::shared_ptr<Transfer> target;   // null while no receive matches
  std::shared_ptr<Transfer> sender;   // of a message to oneself
  std::unique_ptr<std::byte[]> kept;  // the content, if no receive could take it
};

}  // namespace torchcomms_pg::shm
