// Promises of the engine that moves one rank's messages, step by step.
#include "shm/message/MessageEngine.hpp"

#include <memory>
#include <utility>
#include <vector>

#include "Messages.hpp"

using namespace test;
using torchcomms_pg::shm::MessageEngine;
using torchcomms_pg::shm::Segment;
using torchcomms_pg::shm::Transfer;

namespace {

std::shared_ptr<Transfer> transfer(bool sending, Payload& buffer, int peer, int tag = 0) {
  Message one = message(buffer, peer, tag);
  one.sending = sending;
  return std::make_shared<Transfer>(one);
}

void issue(MessageEngine& engine, const std::shared_ptr<Transfer>& transfer) {
  engine.add(transfer);
  engine.start(transfer);
}

}  // namespace

TEST(nothingMovesAfterAMessageForWhichThereWasNoMemory) {
  bool failed = true;
  for (int allocations = 0; failed; ++allocations) {
    const auto segment = Segment::open(uniqueId(), 2);
    MessageEngine engine(*segment, 0);
    std::vector<Payload> buffers(3, Payload(8));
    const std::vector transfers{
        transfer(false, buffers[0], 0), transfer(true, buffers[1], 0),
        transfer(true, buffers[2], 1)};
    for (const auto& one : transfers) issue(engine, one);
    allocationsLeft = allocations;
    engine.step();
    failed = std::exchange(allocationsLeft, -1) <= 0;
    const auto ended = engine.ended();
    if (engine.problem()) {
      CHECK(!engine.step());
      CHECK(engine.ended() == ended);
    } else {
      CHECK_EQUAL(ended.size(), transfers.size());
    }
    CHECK(allocations < 1000);
  }
}

// A started receive has messages that it does not match read ahead, into memory of the heap.
TEST(aReceiveThatIsStartedWithItsMessageLeavesLaterOnesInTheChannel) {
  for (const size_t size : {size_t{8}, kLarge}) {
    const auto segment = Segment::open(uniqueId(), 2);
    MessageEngine sender(*segment, 1), receiver(*segment, 0);
    Payload first = content(size, 1), second = content(8, 2), in(size), never(8);
    issue(sender, transfer(true, first, 0));
    sender.step();
    const auto receive = transfer(false, in, 1), other = transfer(false, never, 1, /*tag=*/5);
    receiver.add(receive);
    issue(receiver, other);
    CHECK(receiver.step());  // reads the first message, or a part of it, for `other`
    CHECK(receiver.cancel(*other));
    receiver.start(receive);
    while (!receive->ended) {
      sender.step();
      receiver.step();
    }
    CHECK(in == first);
    issue(sender, transfer(true, second, 0));
    sender.step();
    CHECK(!receiver.step());
  }
}
