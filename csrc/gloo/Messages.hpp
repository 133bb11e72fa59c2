// Messages of users between the ranks of a group on several hosts.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gloo/Link.hpp"
#include "gloo/Topology.hpp"
#include "nccl/Library.hpp"
#include "shm/Comm.hpp"

namespace torchcomms_pg::gloo {

// One side of a message under way, with ranks as numbered in the group. Owned by Messages.
struct Transfer : Message {
  int partner = 0;        // `peer`, or the actual sender once it is known
  bool together = false;  // started with the others of its batch, see PointToPoint::run()

  // The transfer through shared memory, or null, and once it has ended, its result.
  std::shared_ptr<shm::Transfer> inside;
  std::optional<ncclResult_t> insideResult;

  // The transfer over a link, once it is under way.
  std::optional<Packet> packet;
  bool giving = false;  // a thread without the lock gives the buffer to the link
};

// Messages between ranks of one host go through shared memory. A message to a rank of another host
// uses the rail if the two ranks are counterparts, and else a connection between the two ranks.
// Their first message makes that connection: the peer starts to connect when it issues its own
// first message, or when it finds the request in the store, within a second.
//
// One thread for each peer on another host receives the peer's envelopes in order. Each goes to the
// oldest posted receive that fits it. A receive from any rank is posted in shared memory and for
// all links: if a message over a link comes first, the receive in shared memory is cancelled.
//
// Thread-safe. Functions raise the group's failure. Once a message has ended, also with an error,
// no thread touches its buffer: the caller may free it.
class Messages : public std::enable_shared_from_this<Messages> {
 public:
  // The transports of messages. `rail`: to the counterparts, numbered by host; may be null.
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
  // Starts messages, in this order, without blocking. `together`: if all are inside this host, they
  // proceed only while complete() runs, which is faster.
  Transfers post(const std::vector<Message>& messages, bool together);

  // Blocks until all have been sent or received. No message waits for another one. If it throws, it
  // has withdrawn all.
  void complete(const Transfers& transfers);

  // Ends messages that will not be completed because of `why`: afterwards no thread touches their
  // buffers. If `why` is no NcclError, which follows the group's failure or end, and a message is
  // under way, it fails the group: the message's peer would wait for the rest.
  void withdraw(const Transfers& transfers, const std::exception& why);

  // Returns whether the message is between two ranks of this host; only then is its `done` called
  // without Comm::completeLater().
  bool isInside(const Message& message) const;

  // Checks in the group's store, through the caller's own connection, whether other ranks want to
  // send to this one, and then starts to connect.
  void lookForOthers(c10d::Store& group);

  // Wakes waiting threads, which then check for a failure.
  void wake();
  void close();

 private:
  // Connection with a rank of another host.
  struct Pair {
    std::shared_ptr<Link> link;
    int number = 0;       // the peer's number on the link
    bool shared = false;  // true if the link also serves collectives
    bool connected = false;
    std::string broken;                            // error that ended the connection, or ""
    std::deque<std::shared_ptr<Transfer>> unsent;  // sends that wait until it is connected
    std::deque<Packet> held;                       // envelopes that fit no posted receive
  };

  bool isCounterpart(int peer) const;
  void start(const std::shared_ptr<Transfer>& transfer);
  void addInside(const std::shared_ptr<Transfer>& transfer);
  void sendOutside(const std::shared_ptr<Transfer>& transfer);
  void receiveOutside(const std::shared_ptr<Transfer>& transfer);
  void endInside(Transfer& transfer, ncclResult_t result, int local);
  Pair& pairWith(int peer);
  void receiveLoop(int peer, Pair& pair);
  void connect(int peer, Pair& pair);
  void take(int peer, Pair& pair, const Packet& envelope);
  void accept(
      std::unique_lock<std::mutex>& lock,
      Transfer& receive,
      int peer,
      const Pair& pair,
      const Packet& envelope);
  template <class Give>
  void give(std::unique_lock<std::mutex>& lock, Transfer& transfer, const Give& body);
  void noteBroken(int peer, Pair& pair, const std::string& how);
  bool claim(Transfer& receive);
  void completeOutside(Transfer& transfer);

  const Ways ways_;
  const int rank_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Pair> pairs_;                     // by peer; entries are never removed
  std::deque<std::shared_ptr<Transfer>> posted_;  // receives without a message, in order
  bool closed_ = false;
  int64_t looked_ = 0;  // number of requests to connect with this rank that have been handled
};

}  // namespace torchcomms_pg::gloo
