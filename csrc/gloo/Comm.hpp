// A group of ranks on several hosts: shared memory inside a host, Gloo between hosts.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/WorkerStream.hpp"
#include "gloo/GroupFailure.hpp"
#include "gloo/Link.hpp"
#include "gloo/Messages.hpp"
#include "gloo/Scratch.hpp"
#include "gloo/Topology.hpp"
#include "host/Signature.hpp"
#include "nccl/Library.hpp"
#include "shm/Comm.hpp"

namespace torchcomms_pg::gloo {

// Tells when the ranks are connected. `now`: in Comm::make(), which all ranks then have to call.
// `whenNeeded`: when the first rank communicates, see Link::awaitConnections().
enum class Connected { now, whenNeeded };

// The parts that a communicator is made of.
struct Members {
  c10::intrusive_ptr<c10d::Store> store;  // for this communicator alone
  std::shared_ptr<const Topology> topology;
  // communicator of shm::library() for this host's ranks, in the group's order; Comm destroys it
  ncclComm_t inside = nullptr;
  Connect connect;
  std::chrono::milliseconds timeout;  // time limit for connecting the ranks
  // Returns how a rank's process has ended, such as "(pid 5) died", or "" if the process may still
  // run.
  std::function<std::string(int rank)> died;
};

// The data that an exchange sends to one rank, or receives from one rank.
struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};

// Gloo only moves bytes. The shared-memory library reduces inside a host and host::reduce between
// hosts, with every type and reduction of NCCL. Data is reduced inside each host, then between
// hosts, in a fixed order: every rank gets the same bits. Execution has the steps of each
// collective.
//
// Thread-safe. Operations raise host::NcclError, whose ranks are numbered in the group.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  // Makes a communicator of the ranks that share `members.store`. `look`: see Link::connect().
  static std::shared_ptr<Comm> make(
      Members members, Connected connected, const std::function<void()>& look = {});
  ~Comm();

  const Topology& topology() const { return *members_.topology; }
  GroupFailure& groupFailure() { return *groupFailure_; }

  // Returns the place of an issued collective among this rank's collectives, which all ranks issue
  // in one order. run() executes in the order of places.
  uint64_t nextPlace() { return turns_.take(); }

  // Executes a collective; blocks until this rank's part is done.
  void run(const Collective& collective, uint64_t place);
  // Executes an all-to-all. `sends` and `receives`: by rank, a part of any size.
  void exchange(
      const std::vector<Part>& sends, const std::vector<Part>& receives, ncclDataType_t type,
      uint64_t place);

  Messages& messages() { return *messages_; }

  // Starts the thread of completeLater(). Call this before Messages::post() if the message is
  // completed later. Raises std::runtime_error if no thread can be started.
  void prepareLater() { waiters_.start(); }

  // Waits in a separate thread until the message has ended, and then calls its `done`: Gloo reports
  // the end of a message only to a thread that waits for the message.
  void completeLater(std::shared_ptr<Transfer> transfer);

  // Makes the communicator of the ranks with this rank's color, ordered by key. Returns `inside`, a
  // communicator of shm::library(), if all these ranks are on one host, and `comm` otherwise. Both
  // are null if this rank has no color.
  struct Child {
    std::shared_ptr<Comm> comm;
    ncclComm_t inside = nullptr;
  };
  Child split(int color, int key, uint64_t place);

  // Returns ranks for which this rank's oldest waiting collective, or message inside the host,
  // waits. After a failure, returns the ranks at fault, if known.
  std::vector<int> missingRanks() const;

  // Announces this rank's news by `by`. Returns a look at the store, for a rank that waits for
  // nothing and so notices no broken connection. The look fails the group with a failure that
  // another rank has written, and connects the ranks if another rank has requested this.
  std::function<void()> probe(Announcements by);
  // Does what Library::ring does, for the ranks of this host.
  uint64_t ring(uint64_t times);

  // Ends the connections. After a failure, first waits until the other ranks can read the reason,
  // see GroupFailure::awaitTold(). What this rank has sent before still arrives.
  void close();

 private:
  friend class Execution;

  explicit Comm(Members members);
  void connectRail(Connected connected, const std::function<void()>& look);
  void runHere(const Collective& collective, uint64_t place);
  // If `result` is an error, raises the failure of members_.inside, or else its last error.
  void checkInside(ncclResult_t result) const;
  // Executes `body` when all earlier collectives have ended. Fails the group with any failure of
  // shared memory or Gloo.
  void execute(uint64_t place, const std::function<void()>& body);

  const Members members_;
  const std::shared_ptr<shm::Comm> inside_;
  const std::shared_ptr<GroupFailure> groupFailure_;
  // connections with this rank's counterparts; null if this rank is on no rail, or on the only host
  std::shared_ptr<Link> rail_;
  std::shared_ptr<Messages> messages_;
  shm::TicketLock turns_;
  Scratch scratch_;  // used by the operation whose turn it is
  WorkerStream waiters_{"tcpg_gloo"};
  std::atomic<bool> closed_{false};
};

}  // namespace torchcomms_pg::gloo
