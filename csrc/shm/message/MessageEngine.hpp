// Moves the messages of one rank between buffers and channels.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shm/message/Channel.hpp"
#include "shm/message/Matcher.hpp"
#include "shm/message/Transfer.hpp"
#include "shm/segment/Segment.hpp"

namespace torchcomms_pg::shm {

// Never blocks and calls no callbacks. Not thread-safe.
//
// A message whose receive has not been started stays in its channel, unless a started receive may
// wait for a later message. In that case the engine copies the first message to the heap, so that
// it never holds up a message of another tag.
class MessageEngine {
 public:
  MessageEngine(Segment& segment, int rank);

  // Fixes the transfer's place in the order of its peer and tag. Does not throw: problem() has the
  // error, if any.
  void add(const std::shared_ptr<Transfer>& transfer);

  // Allows the engine to access the transfer's buffer. Does not throw.
  void start(const std::shared_ptr<Transfer>& transfer);

  // Withdraws a receive. Returns false if the receive has its message.
  bool cancel(const Transfer& receive) { return matcher_.cancel(receive); }

  // Moves the bytes that can be moved, up to a limit per message, and returns whether any moved.
  // Once problem() is set, moves nothing: a failed allocation may have left a transfer half ended.
  bool step();

  // Returns the list of ended transfers, which the caller clears.
  std::vector<std::shared_ptr<Transfer>>& ended() { return ended_; }

  // Returns the error with which the communicator must fail, or null.
  std::shared_ptr<const NcclError> problem() const { return problem_; }

  // Returns the started transfer that was added first, or null.
  const Transfer* oldestPending() const;

 private:
  struct Outgoing {
    ChannelWriter channel;
    std::deque<std::shared_ptr<Transfer>> queue;
    std::shared_ptr<Transfer> current;  // being written
    uint64_t messages = 0;
    // Confirmed sends that are written and not yet received, by slot; element 0 is unused. Has no
    // elements before the first such send.
    std::vector<std::shared_ptr<Transfer>> unreceived;
    size_t unreceivedCount = 0;
    bool active = false;  // whether sendingTo_ lists the destination
  };
  struct Arriving {
    ChannelReader channel;
    std::shared_ptr<Transfer> current;  // being read; without a buffer while no receive matches
    uint64_t messages = 0;
  };

  template <class Body>
  void whileMemoryLasts(const Body& body);
  void moveAll();
  void pumpOut(int destination);
  bool chooseNext(Outgoing& out);
  void pumpIn(int source);
  bool openMessage(int source, Arriving& arriving);
  bool moveIn(int source, Arriving& arriving);
  void pumpSelf();
  void match(const std::shared_ptr<Transfer>& message, const std::shared_ptr<Transfer>& receive);
  bool noteMatch(const Message& message, Transfer& receive);
  void endReceive(const std::shared_ptr<Transfer>& receive);
  void end(const std::shared_ptr<Transfer>& transfer);
  void report(ncclResult_t result, const std::string& text);

  Segment& segment_;
  const int rank_;
  uint64_t added_ = 0;
  bool moved_ = false;
  const std::shared_ptr<const NcclError> noMemory_;
  std::shared_ptr<const NcclError> problem_;
  Matcher matcher_;
  std::vector<Outgoing> outgoing_;
  std::vector<Arriving> arriving_;
  std::vector<int> sendingTo_;
  // Sends to this rank itself, and their receives.
  std::vector<std::pair<std::shared_ptr<Transfer>, std::shared_ptr<Transfer>>> toSelf_;
  std::vector<std::shared_ptr<Transfer>> ended_;
};

}  // namespace torchcomms_pg::shm
