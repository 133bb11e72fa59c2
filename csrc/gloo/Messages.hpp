// Messages of users between the ranks of a group on several hosts.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/Mutex.hpp"
#include "gloo/Link.hpp"
#include "gloo/Topology.hpp"
#include "nccl/Library.hpp"
#include "shm/Comm.hpp"

namespace torchcomms_pg::gloo {

// One side of a message under way, with ranks as numbered in the group. Only Messages changes it.
struct Transfer : Message {
  int partner = 0;        // `peer`, or the actual sender once it is known
  bool together = false;  // true if PointToPoint::run() moves it with its batch

  // The transfer through shared memory, or null. Its result after its end, unless `done` or
  // PointToPoint::run() reports it.
  std::shared_ptr<shm::Transfer> inside;
  std::optional<ncclResult_t> insideResult;

  // The transfer over a link, once it is under way.
  std::optional<Packet> packet;
  bool giving = false;  // true while a thread gives the buffer to the link without the lock
};

// Messages between ranks of one host go through shared memory. A message between hosts uses the
// rail if the two ranks are counterparts, and otherwise a connection of the two ranks alone. Their
// first message makes this connection: the peer starts to connect when it issues a message with
// this rank or, within about a second, finds this rank's request in the store.
//
// One thread for each peer on another host receives the peer's envelopes in order. Each envelope
// goes to the oldest posted receive that fits. A receive from any rank is posted in shared memory
// and for all links: if a message arrives over a link first, the receive in shared memory is
// cancelled.
//
// Thread-safe. Functions raise the group's failure. Once a message has ended, even with an error,
// no thread touches its buffer: the caller may free it.
class Messages : public std::enable_shared_from_this<Messages> {
 public:
  // The transports of messages. `rail`: the link to the counterparts, numbered by host; may be
  // null.
  struct Ways {
    std::shared_ptr<const Topology> topology;
    std::shared_ptr<shm::Comm> inside;
    std::shared_ptr<Link> rail;
    std::function<std::shared_ptr<Link>(const std::string& name, const std::vector<int>& ranks)>
        newLink;
    std::shared_ptr<GroupFailure> groupFailure;
  };
  explicit Messages(Ways ways);

  using Transfers = std::vector<std::shared_ptr<Transfer>>;
  // Starts messages in this order, without waiting for peers. `together`: if all messages are
  // inside this host and without `done`, they proceed only while complete() runs, which is faster.
  Transfers post(const std::vector<Message>& messages, bool together);

  // Blocks until all messages have been sent or received; they proceed independently. If it throws,
  // no thread touches their buffers any more.
  void complete(const Transfers& transfers);

  // Ends messages that will not be completed because of `why`; afterwards no thread touches their
  // buffers. If `why` is an NcclError, the group has failed or ended. Any other error fails the
  // group if a message is under way, since the message's peer would wait for the rest.
  void withdraw(const Transfers& transfers, const std::exception& why);

  // Returns whether the message is between two ranks of this host. Only the `done` of such a
  // message is called without Comm::completeLater().
  bool isInside(const Message& message) const;

  // Starts to connect with ranks that have requested this in the group's store. Fails the group if
  // a rank has left with which this rank is still connecting.
  void lookForOthers(c10d::Store& group);

  // Wakes waiting threads, so that they check for a failure.
  void wake();
  void close();

 private:
  // Connection with a rank of another host.
  struct Pair {
    std::shared_ptr<Link> link;
    int number = 0;       // the peer's number on the link
    bool shared = false;  // true if the link also serves collectives
    bool connected = false;
    std::string broken;                            // error that ended the connection, or "" if none
    std::deque<std::shared_ptr<Transfer>> unsent;  // sends that wait for the connection
    std::deque<Packet> held;                       // envelopes that fit no posted receive
  };

  bool isCounterpart(int peer) const;
  void start(const std::shared_ptr<Transfer>& transfer);
  void addInside(const std::shared_ptr<Transfer>& transfer);
  void sendOutside(const std::shared_ptr<Transfer>& transfer);
  void receiveOutside(const std::shared_ptr<Transfer>& transfer);
  void endInside(Transfer& transfer, ncclResult_t result, int local);
  Pair& pairWith(int peer) REQUIRES(mutex_);
  void receiveLoop(int peer, Pair& pair);
  void connect(int peer, Pair& pair);
  void take(int peer, Pair& pair, const Packet& envelope);
  void accept(Transfer& receive, int peer, const Pair& pair, const Packet& envelope)
      REQUIRES(mutex_);
  template <class Give>
  void give(Transfer& transfer, const Give& body) REQUIRES(mutex_);
  void noteBroken(int peer, Pair& pair, const std::string& how);
  bool claim(Transfer& receive) REQUIRES(mutex_);
  void completeOutside(Transfer& transfer);

  const Ways ways_;
  const int rank_;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Pair> pairs_ GUARDED_BY(mutex_);  // by peer; receiveLoop() refers to the entry
  // Receives that have no message yet, in order.
  std::deque<std::shared_ptr<Transfer>> posted_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  int64_t looked_ = 0;  // number of requests to connect with this rank that have been handled
};

}  // namespace torchcomms_pg::gloo
