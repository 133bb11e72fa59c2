// Messages of users between the ranks of a group on several hosts.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gloo/Link.hpp"
#include "gloo/Topology.hpp"
#include "nccl/NcclApi.hpp"
#include "shm/Comm.hpp"

namespace torchcomms_pg::gloo {

// One message under way. Belongs to Messages.
struct Request {
  bool sending = false;
  Message message;
  int peer = 0;  // the other rank, once it is known

  // Transfer through memory; null: none.
  std::shared_ptr<shm::Transfer> inside;
  bool together = false;  // started with the others of its batch, see PointToPoint::run()
  bool insideEnded = false;
  ncclResult_t insideResult = ncclSuccess;

  // Transfer over a link; `pending` is null until the data is under way.
  std::shared_ptr<Link> link;
  std::shared_ptr<PendingMessage> pending;
};

// Messages between ranks of one host go through memory. To a rank of another host they go over the
// lane if it is the counterpart, and else over a connection of the two, which the first message
// makes: the other side begins to connect with its own first message, or learns of it within a
// second.
//
// A thread for each rank of another host with which there have been messages takes their envelopes
// in the order in which they come, and gives each to the receive that was posted first of those
// that may have it. A receive from any rank waits for memory and for links: what comes first over a
// link takes the receive out of memory again.
//
// Thread-safe. Functions raise the group's failure.
class Messages : public std::enable_shared_from_this<Messages> {
 public:
  // The ways that messages can take. `lane`: to the counterparts, by host; may be null.
  struct Ways {
    std::shared_ptr<const Topology> topology;
    std::shared_ptr<shm::Comm> inside;
    std::shared_ptr<Link> lane;
    std::function<std::shared_ptr<Link>(const std::string& name, const std::vector<int>& ranks)>
        newLink;
    std::shared_ptr<Fault> fault;
  };
  explicit Messages(Ways ways);

  using Requests = std::vector<std::shared_ptr<Request>>;
  struct Issued {
    bool sending;
    Message message;
  };
  // Begins with messages, in this order, without blocking. `together`: they proceed only while
  // complete() runs, which is quicker if all are inside.
  Requests post(const std::vector<Issued>& messages, bool together);

  // Blocks until all have been sent or received; none of them waits for another one.
  void complete(const Requests& requests);

  // Returns whether the message is between two ranks of this host; it then calls its `done` by
  // itself.
  bool isInside(const Message& message) const;

  // Looks in the group's store, through the caller's own connection, for messages that other ranks
  // want to send.
  void lookForOthers(c10d::Store& group);

  // Makes waiting threads look for a failure.
  void wake();
  void close();

 private:
  // A rank of another host.
  struct Pair {
    std::shared_ptr<Link> link;
    int number = 0;       // the rank's number on the link
    bool shared = false;  // the link also serves collectives
    bool connected = false;
    std::string broken;                           // error that ended the connection
    std::deque<std::shared_ptr<Request>> unsent;  // sends that wait for the connection
    std::deque<PendingMessage> held;              // envelopes that no receive has asked for
  };

  bool isCounterpart(int peer) const;
  void addInside(const std::shared_ptr<Request>& request);
  void sendOutside(const std::shared_ptr<Request>& request);
  void receiveOutside(const std::shared_ptr<Request>& request);
  void endInside(Request& request, ncclResult_t result, int local);
  Pair& pairWith(int peer);
  void converse(int peer, Pair& pair);
  void connect(int peer, Pair& pair);
  void take(int peer, Pair& pair, const PendingMessage& envelope);
  void accept(Request& receive, int peer, const Pair& pair, PendingMessage envelope);
  void noteBroken(int peer, Pair& pair, const std::string& how);
  bool claim(const Request& receive);
  void completeOutside(Request& request);

  const Ways ways_;
  const int rank_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Pair> pairs_;                    // by rank; none is removed
  std::deque<std::shared_ptr<Request>> posted_;  // receives without a message, in order
  bool closed_ = false;
  int64_t looked_ = 0;  // number of other ranks' wishes that have been fulfilled
};

}  // namespace torchcomms_pg::gloo
